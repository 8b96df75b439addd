// Recipes over FP8 codes: codes imply their scales, and a cast of codes dequantises them.
#include <gtest/gtest.h>

#include <algorithm>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

// Codes "N" and scales "N_scale_inv" for each name N, but no scales for the name "bare".
Manifest fp8_manifest(const std::vector<std::string>& names) {
  Manifest manifest;
  const auto add = [&](const std::string& name, DType dtype, std::vector<int64_t> shape) {
    manifest.tensors.push_back({{name, Role::param, dtype, std::move(shape)}, {}});
  };
  for (const std::string& name : names) {
    add(name, DType::f8_e4m3, {256, 128});
    if (name == "bare") continue;
    add(name + "_scale_inv", DType::f32, {2, 1});
    const auto scale = static_cast<uint32_t>(manifest.tensors.size() - 1);
    manifest.tensors[scale - 1].scale = BlockScale{scale, {128, 128}};
  }
  return manifest;
}

std::string names_of(const Recipe& recipe) {
  std::string names;
  for (const Target& target : recipe.targets) {
    names += target.spec.fqn;
    names += ':';
    names += torch_name(target.spec.dtype);
    names += ' ';
  }
  return names;
}

std::optional<Error> failure_of(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Fp8Recipe, IdentityKeepsCodesAndScalesUnlessTheyAreDequantised) {
  const Manifest manifest = fp8_manifest({"a", "bare", "b"});
  EXPECT_EQ(names_of(make_recipe(manifest)),
            "a:float8_e4m3fn a_scale_inv:float32 bare:float8_e4m3fn b:float8_e4m3fn "
            "b_scale_inv:float32 ");
  const Recipe cast = make_recipe(manifest, {.dtype = DType::bf16});
  EXPECT_EQ(names_of(cast), "a:bfloat16 bare:float8_e4m3fn b:bfloat16 ");
  EXPECT_TRUE(is_dequantised(cast, cast.targets[0]));
  EXPECT_FALSE(is_dequantised(cast, cast.targets[1]));
  EXPECT_TRUE(cast.unused.empty());
  EXPECT_EQ(names_of(make_recipe(manifest, {.keep_fp32 = "^a"})),
            "a:float32 bare:float8_e4m3fn b:float8_e4m3fn b_scale_inv:float32 ");
  EXPECT_EQ(names_of(make_recipe(manifest, {.dtype = DType::f16, .keep_fp32 = "b"})),
            "a:float16 bare:float8_e4m3fn b:float32 ");
}

TEST(Fp8Recipe, UsedCodesImplyTheirScales) {
  const Manifest manifest = fp8_manifest({"a", "b"});
  const std::string stack = R"({"targets": {"ab": {"op":"stack","dim":0,"in":[
      {"op":"stored","name":"a"},{"op":"stored","name":"b"}],"dtype":"bfloat16"}}, "unused": [)";
  const Recipe recipe = make_recipe(manifest, {.text = stack + "]}"});
  EXPECT_EQ(names_of(recipe), "ab:bfloat16 ");
  EXPECT_TRUE(recipe.nodes[recipe.targets[0].root].is_scaled);
  EXPECT_TRUE(is_dequantised(recipe, recipe.targets[0]));
  EXPECT_EQ(parse_recipe(stack + R"("a_scale_inv"]})", manifest).unused.size(), 1U);
  const std::string written = recipe_text(recipe, manifest);
  EXPECT_EQ(recipe_text(parse_recipe(written, manifest), manifest), written);
  // Scales without codes are ordinary tensors.
  const auto forgotten = failure_of([&] {
    make_recipe(manifest, {.text = R"({"targets": {"a": {"op":"stored","name":"a"}},
                                       "unused": ["b"]})"});
  });
  ASSERT_TRUE(forgotten.has_value());
  EXPECT_EQ(forgotten->category(), Category::mismatch);
  EXPECT_EQ(forgotten->facts().tensor, "b_scale_inv");
}

TEST(Fp8Recipe, CodesWithoutAScaleAreNotCast) {
  const Manifest manifest = fp8_manifest({"a", "bare"});
  for (const char* root : {R"({"op":"stored","name":"bare","dtype":"bfloat16"})",
                           R"({"op":"cat","dim":0,"dtype":"float32","in":[
                               {"op":"stored","name":"a"},{"op":"stored","name":"bare"}]})"}) {
    const auto error = failure_of([&] {
      make_recipe(manifest,
                  {.text = R"({"targets": {"t": )" + std::string(root) + R"(}, "unused": []})"});
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->category(), Category::unsupported);
    EXPECT_EQ(error->facts().tensor, "t");
  }
  RecipeBuilder builder(manifest);
  const uint32_t mixed = builder.cat(0, {builder.stored("a"), builder.stored("bare")});
  builder.target("t", mixed);
  Recipe recipe = builder.finish();
  set_dtype(recipe, DType::bf16, "");
  EXPECT_EQ(names_of(recipe), "t:float8_e4m3fn ");
  // Values can't be cast to codes, either.
  RecipeBuilder back(manifest);
  const uint32_t scale = back.stored("a_scale_inv");
  EXPECT_EQ(failure_of([&] { back.target("s", scale, DType::f8_e4m3); })->category(),
            Category::unsupported);
}

TEST(Fp8Recipe, ARefusedCastNamesTheDtypeOrTheMissingScale) {
  const Manifest manifest = fp8_manifest({"a", "bare"});
  const auto cast = [&](std::string_view name, DType dtype) {
    RecipeBuilder builder(manifest);
    const uint32_t codes = builder.stored(name);
    return std::string(failure_of([&] { builder.target("t", codes, dtype); })->what());
  };
  EXPECT_EQ(cast("a", DType::i64),
            "UNSUPPORTED: a cast from float8_e4m3fn to int64 (tensor t, expected a cast to "
            "float32, bfloat16 or float16)");
  EXPECT_EQ(cast("bare", DType::bf16),
            "UNSUPPORTED: a cast from float8_e4m3fn to bfloat16 (tensor t, expected a scale for "
            "each stored tensor of FP8 codes)");
}

TEST(Fp8Recipe, ATieOfTensorsOfWhichOneHasScalesIsRefused) {
  const Manifest manifest = fp8_manifest({"a", "bare"});
  RecipeBuilder builder(manifest);
  builder.target("a", builder.stored("a"));
  builder.alias("bare", "a", builder.stored("bare"));
  EXPECT_STREQ(failure_of([&] { builder.finish(); })->what(),
               "MISMATCH: a tensor that is tied to 'a' has another shape or dtype, or only one of "
               "them has scales; --untie, or in Python a model built with "
               "tie_word_embeddings=False, loads both (tensor bare, expected float8_e4m3fn "
               "[256, 128] with scales, got float8_e4m3fn [256, 128])");
}

TEST(Fp8Recipe, AnAliasIsDequantisedToo) {
  const Manifest manifest = fp8_manifest({"a"});
  const Recipe recipe =
      make_recipe(manifest, {.text = R"({"targets": {"a": {"op":"stored","name":"a"},
                             "again": {"op":"alias","of":"a"}}, "unused": []})",
                             .dtype = DType::f16});
  EXPECT_EQ(names_of(recipe), "a:float16 again:float16 ");
}

}  // namespace
}  // namespace modicum
