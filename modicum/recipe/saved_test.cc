// Checks the elements that a save writes one by one, with element_source.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

Manifest stored(std::vector<std::pair<std::string, std::vector<int64_t>>> shapes,
                DType dtype = DType::bf16) {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors"});
  for (auto& [name, shape] : shapes) {
    manifest.tensors.push_back({{name, Role::param, dtype, std::move(shape)}, {}});
  }
  return manifest;
}

// The form's tensors as a manifest, in a different order.
Manifest manifest_of(const SavedForm& form) {
  Manifest manifest;
  for (auto it = form.tensors.rbegin(); it != form.tensors.rend(); ++it) {
    manifest.tensors.push_back({it->spec, {}});
  }
  return manifest;
}

std::vector<std::string> names_of(const SavedForm& form) {
  std::vector<std::string> names;
  for (const SavedTensor& tensor : form.tensors) names.push_back(tensor.spec.fqn);
  return names;
}

using Names = std::vector<std::string>;

// Each target element comes from one saved element, and from the same stored element as before.
void prove(const Recipe& recipe, const Manifest& manifest, const SavedForm& form) {
  const Manifest saved = manifest_of(form);
  const Recipe again = saved_recipe(recipe, manifest, form, saved);
  std::map<std::string, std::set<int64_t>> sources;
  ASSERT_EQ(again.targets.size(), recipe.targets.size());
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    EXPECT_EQ(again.targets[t].spec, recipe.targets[t].spec);
    EXPECT_EQ(again.is_alias(t), recipe.is_alias(t));
    if (recipe.is_alias(t) && !recipe.is_compared(t)) continue;
    for (int64_t e = 0; e < numel_of(recipe.targets[t].spec.shape); ++e) {
      const ElementSource now = element_source(again, again.read_node(t), e);
      if (now.leaf->op != Op::stored) continue;
      const TensorSpec& spec = saved.tensors[now.leaf->from].spec;
      EXPECT_EQ(now.leaf->shape, spec.shape);
      EXPECT_EQ(now.leaf->dtype, spec.dtype);
      EXPECT_TRUE(sources[spec.fqn].insert(now.first).second) << spec.fqn << " " << now.first;
      if (form.as_target[t]) {
        EXPECT_EQ(spec.fqn, recipe.targets[t].spec.fqn);
        EXPECT_EQ(now.first, e);
      } else {
        const ElementSource before = element_source(recipe, recipe.read_node(t), e);
        EXPECT_EQ(spec.fqn, manifest.tensors[before.leaf->from].spec.fqn);
        EXPECT_EQ(now.first, before.first);
      }
    }
  }
  for (const SavedTensor& tensor : form.tensors) {
    const auto numel = static_cast<int64_t>(sources[tensor.spec.fqn].size());
    EXPECT_EQ(numel, tensor.is_copied ? 0 : numel_of(tensor.spec.shape)) << tensor.spec.fqn;
  }
}

TEST(SavedForm, ConversionsAreInverted) {
  const Manifest manifest = stored({{"e0.gate", {3, 4}},
                                    {"e0.up", {3, 4}},
                                    {"e1.gate", {3, 4}},
                                    {"e1.up", {3, 4}},
                                    {"conv", {4, 6}},
                                    {"qkv", {6, 4}},
                                    {"rope", {8, 2}},
                                    {"empty", {0, 4}}});
  RecipeBuilder b(manifest);
  b.target("experts", b.cat(1, {b.stack(0, {b.stored("e0.gate"), b.stored("e1.gate")}),
                                b.stack(0, {b.stored("e0.up"), b.stored("e1.up")})}));
  b.target("linear", b.permute({1, 0}, b.stored("conv")));
  b.target("q", b.slice(0, 0, 4, b.stored("qkv")));
  b.target("kv", b.slice(0, 4, 6, b.stored("qkv")));
  b.target("rotated", b.gather(0, {0, 4, 1, 5, 2, 6, 3, 7}, b.stored("rope")));
  b.target("nothing", b.reshape({4, 0}, b.stored("empty")));
  const Recipe recipe = b.finish();
  const SavedForm form = saved_form(recipe, manifest);
  EXPECT_EQ(names_of(form),
            (Names{"e0.gate", "e0.up", "e1.gate", "e1.up", "conv", "qkv", "rope", "empty"}));
  EXPECT_EQ(form.left_out, std::vector<uint32_t>{});
  prove(recipe, manifest, form);
}

// Stored elements that no target holds or that are held twice, and targets with values that were
// not stored.
TEST(SavedForm, TargetsThatCantBeInvertedAreSavedAsTargets) {
  const Manifest manifest = stored({{"cut", {6, 4}},
                                    {"gap", {6, 2}},
                                    {"twice", {4, 2}},
                                    {"shared", {4}},
                                    {"grown", {3, 2}},
                                    {"fine", {5}}});
  RecipeBuilder b(manifest);
  b.target("cut", b.slice(0, 0, 5, b.stored("cut")));
  b.target("gap.a", b.slice(0, 0, 2, b.stored("gap")));
  b.target("gap.b", b.slice(0, 3, 6, b.stored("gap")));
  b.target("twice",
           b.gather(0, {0, 1, 1, 3}, b.stored("twice")));  // 4 elements, but element 2 is missing
  b.target("one", b.stored("shared"));
  b.target("two", b.stored("shared"));
  b.target("grown", b.cat(0, {b.stored("grown"), b.init(InitRule::zeros, 0, {1, 2}, DType::bf16)}));
  b.target("fine", b.stored("fine"));
  b.target("fresh", b.init(InitRule::ones, 0, {7}, DType::f32));
  const Recipe recipe = b.finish();
  const SavedForm form = saved_form(recipe, manifest);
  EXPECT_EQ(names_of(form),
            (Names{"cut", "gap.a", "gap.b", "twice", "one", "two", "grown", "fine", "fresh"}));
  EXPECT_EQ(form.left_out, (std::vector<uint32_t>{0, 1, 2, 3, 4}));
  prove(recipe, manifest, form);
}

// `bc` can't be inverted, since no target holds the last row of c. `ab` shares b with it, so both
// are saved as targets.
TEST(SavedForm, TargetsThatShareAStoredTensorAreBothSavedAsTargets) {
  const Manifest manifest = stored({{"a", {4, 2}}, {"b", {4, 2}}, {"c", {4, 2}}});
  RecipeBuilder b(manifest);
  b.target("ab", b.cat(0, {b.stored("a"), b.slice(0, 0, 2, b.stored("b"))}));
  b.target("bc", b.cat(0, {b.slice(0, 2, 4, b.stored("b")), b.slice(0, 0, 3, b.stored("c"))}));
  const Recipe recipe = b.finish();
  const SavedForm form = saved_form(recipe, manifest);
  EXPECT_EQ(names_of(form), (Names{"ab", "bc"}));
  prove(recipe, manifest, form);
}

TEST(SavedForm, ATieStoredTwiceKeepsBothNames) {
  const Manifest manifest = stored({{"embed", {4, 2}}, {"head", {4, 2}}});
  const std::vector<NamedTie> ties = {{"head", "embed"}};
  const Recipe recipe = identity_recipe(manifest, ties);
  const SavedForm form = saved_form(recipe, manifest);
  EXPECT_EQ(names_of(form), (Names{"embed", "head"}));
  prove(recipe, manifest, form);
  const Manifest once = stored({{"embed", {4, 2}}});
  const Recipe tied = identity_recipe(once, ties);
  EXPECT_EQ(names_of(saved_form(tied, once)), Names{"embed"});
}

TEST(SavedForm, UnreadTensorsAreCopiedOrLeftOut) {
  const Manifest manifest = stored({{"a", {4}}, {"b", {3}}});
  RecipeBuilder b(manifest);
  b.target("a", b.stored("a"));
  b.unused("b");
  const Recipe recipe = b.finish();
  const SavedForm copied = saved_form(recipe, manifest);
  ASSERT_EQ(names_of(copied), (Names{"a", "b"}));
  EXPECT_TRUE(copied.tensors[1].is_copied);
  prove(recipe, manifest, copied);
  const Recipe again = saved_recipe(recipe, manifest, copied, manifest_of(copied));
  EXPECT_EQ(again.unused, std::vector<uint32_t>{0});  // an index in the reordered manifest
  const SavedForm dropped = saved_form(recipe, manifest, {.copies_unused = false});
  EXPECT_EQ(names_of(dropped), Names{"a"});
  EXPECT_EQ(dropped.left_out, std::vector<uint32_t>{1});
}

TEST(SavedForm, ComputedTargetsAreNotSaved) {
  const Manifest manifest = stored({{"a", {4}}});
  RecipeBuilder b(manifest);
  b.target("a", b.stored("a"));
  b.target("inv_freq", b.caller(0, {3}, DType::f32));
  const Recipe recipe = b.finish();
  EXPECT_EQ(names_of(saved_form(recipe, manifest)), (Names{"a", "inv_freq"}));
  const SavedForm form = saved_form(recipe, manifest, {.is_computed = {true, true}});
  EXPECT_EQ(names_of(form), Names{"a"});
  prove(recipe, manifest, form);
}

TEST(SavedForm, FloatsAreSavedInTheTargetsDtypeUnlessAnotherIsRequested) {
  Manifest manifest = stored({{"w", {4, 4}}, {"ids", {3}}});
  manifest.tensors[1].spec.dtype = DType::i64;
  Recipe recipe = make_recipe(manifest, {.dtype = DType::f32});
  const SavedForm loaded = saved_form(recipe, manifest);
  EXPECT_EQ(loaded.tensors[0].spec.dtype, DType::f32);
  EXPECT_EQ(loaded.tensors[1].spec.dtype, DType::i64);
  prove(recipe, manifest, loaded);
  const SavedForm asked = saved_form(recipe, manifest, {.dtype = DType::f16});
  EXPECT_EQ(asked.tensors[0].spec.dtype, DType::f16);
  EXPECT_EQ(asked.tensors[1].spec.dtype, DType::i64);
  prove(recipe, manifest, asked);
}

TEST(SavedForm, DequantisedCodesLoseTheirScales) {
  Manifest manifest = stored({{"w", {4, 4}}, {"w_scale", {2, 2}}});
  manifest.tensors[0].spec.dtype = DType::f8_e4m3;
  manifest.tensors[0].scale = BlockScale{1, {2, 2}};
  manifest.tensors[1].spec.dtype = DType::f32;
  const Recipe dequantised = make_recipe(manifest, {.dtype = DType::bf16});
  const SavedForm form = saved_form(dequantised, manifest);
  EXPECT_EQ(names_of(form), Names{"w"});
  EXPECT_EQ(form.tensors[0].spec.dtype, DType::bf16);
  EXPECT_EQ(form.left_out, std::vector<uint32_t>{1});
  prove(dequantised, manifest, form);
  // Codes that are not dequantised keep their scales, even if the recipe does not name these.
  const SavedForm kept = saved_form(make_recipe(manifest), manifest);
  EXPECT_EQ(names_of(kept), (Names{"w", "w_scale"}));
  RecipeBuilder b(manifest);
  b.target("w", b.stored("w"));
  const SavedForm unnamed = saved_form(b.finish(), manifest, {.copies_unused = false});
  EXPECT_EQ(names_of(unnamed), (Names{"w", "w_scale"}));
}

// Codes could not be read without their scales.
TEST(SavedForm, ScalesOfCodesAreCopiedEvenIfUnusedTensorsAreNot) {
  Manifest manifest = stored({{"w", {4, 4}}, {"w_scale", {2, 2}}, {"v", {4}}, {"v_scale", {1}}});
  for (const uint32_t codes : {0U, 2U}) {
    manifest.tensors[codes].spec.dtype = DType::f8_e4m3;
    manifest.tensors[codes].scale = BlockScale{codes + 1, {2, 2}};
    manifest.tensors[codes + 1].spec.dtype = DType::f32;
  }
  RecipeBuilder b(manifest);
  b.target("w", b.stored("w"));
  for (const char* name : {"w_scale", "v", "v_scale"}) b.unused(name);
  const Recipe recipe = b.finish();
  const SavedForm form = saved_form(recipe, manifest, {.copies_unused = false});
  EXPECT_EQ(names_of(form), (Names{"w", "w_scale"}));
  EXPECT_EQ(form.left_out, (std::vector<uint32_t>{2, 3}));
  prove(recipe, manifest, form);
}

TEST(SavedForm, ScalesAreKeptForCodesThatAnotherTargetDequantises) {
  Manifest manifest = stored({{"w", {4, 4}}, {"w_scale", {2, 2}}});
  manifest.tensors[0].spec.dtype = DType::f8_e4m3;
  manifest.tensors[0].scale = BlockScale{1, {2, 2}};
  manifest.tensors[1].spec.dtype = DType::f32;
  RecipeBuilder b(manifest);
  b.target("w", b.stored("w"));
  b.target("w_bf16", b.stored("w"), DType::bf16);
  const SavedForm form = saved_form(b.finish(), manifest);
  EXPECT_EQ(names_of(form), (Names{"w", "w_bf16", "w_scale"}));
  EXPECT_EQ(form.tensors[0].spec.dtype, DType::f8_e4m3);
}

TEST(SavedForm, TwoTensorsWithOneNameAreAMismatch) {
  const Manifest manifest = stored({{"a", {4}}, {"b", {4}}});
  RecipeBuilder b(manifest);
  b.target("b", b.slice(0, 0, 3, b.stored("a")));
  b.target("a", b.stored("b"));
  try {
    saved_form(b.finish(), manifest);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::mismatch);
    EXPECT_EQ(error.facts().tensor, "b");
  }
}

}  // namespace
}  // namespace modicum
