#include "modicum/recipe/recipe.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "modicum/json/json_values_double.h"

namespace modicum {
namespace {

Manifest manifest_of(std::vector<std::pair<std::string, std::vector<int64_t>>> tensors,
                     DType dtype = DType::f32) {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors", {}, 8});
  uint64_t end = 8;
  for (auto& [name, shape] : tensors) {
    const uint64_t bytes = bytes_of(dtype, numel_of(shape));
    manifest.tensors.push_back({{name, Role::param, dtype, shape}, {0, end, end + bytes}});
    end += bytes;
  }
  return manifest;
}

Category category_of(FunctionRef<void()> call, std::string* tensor = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (tensor != nullptr) *tensor = error.facts().tensor;
    return error.category();
  }
  return Category::count;
}

using Source = std::pair<uint32_t, int64_t>;  // stored tensor, element

// The stored element that pull_back assigns to each place, for a box over the node's shape.
std::vector<Source> pulled(const Recipe& recipe, uint32_t node, const Box& box, int64_t room) {
  std::vector<Source> out(static_cast<size_t>(room), {UINT32_MAX, -1});
  pull_back(recipe, node, box, [&](const Node& leaf, const Box& part) {
    for_each_runs(part, [&](const Runs& r) {
      for (int64_t k = 0; k < r.count; ++k) {
        for (int64_t i = 0; i < r.length; ++i) {
          Source& source = out.at(static_cast<size_t>(r.at + k * r.at_stride + i * r.at_step));
          EXPECT_EQ(source.first, UINT32_MAX) << "two boxes write one place";
          source = {leaf.from, r.first + k * r.stride + i};
        }
      }
    });
  });
  return out;
}

Source by_element(const Recipe& recipe, uint32_t node, int64_t element) {
  const ElementSource source = element_source(recipe, node, element);
  EXPECT_GE(source.count, 1);
  return {source.leaf->from, source.first};
}

// A random box, with the steps of a row-major destination.
Box random_box(const std::vector<int64_t>& shape, std::mt19937& random) {
  Box box;
  for (const int64_t size : shape) {
    int64_t lo = std::uniform_int_distribution<int64_t>(0, size)(random);
    int64_t hi = std::uniform_int_distribution<int64_t>(0, size)(random);
    if (lo > hi) std::swap(lo, hi);
    if (random() % 3 == 0) lo = 0, hi = size;
    box.push({size, lo, hi, 0});
  }
  int64_t step = 1;
  for (int d = box.rank - 1; d >= 0; --d) {
    box.dims[static_cast<size_t>(d)].step = step;
    step *= box.dims[static_cast<size_t>(d)].extent();
  }
  return box;
}

void expect_box_agrees(const Recipe& recipe, uint32_t node, const Box& box) {
  const auto got = pulled(recipe, node, box, box.numel());
  const std::vector<int64_t>& shape = recipe.nodes[node].shape;
  for (int64_t local = 0; local < box.numel(); ++local) {
    int64_t rest = local;
    int64_t element = 0;
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      const BoxDim& dim = box.dims[d];
      element += (dim.lo + rest % dim.extent()) * stride;
      rest /= dim.extent();
      stride *= shape[d];
    }
    ASSERT_EQ(got[static_cast<size_t>(local)], by_element(recipe, node, element));
  }
}

// One random op on top of `in`.
uint32_t random_op(RecipeBuilder& builder, uint32_t in, std::mt19937& random,
                   FunctionRef<const std::vector<int64_t>&(uint32_t)> shape_of) {
  const std::vector<int64_t> shape = shape_of(in);
  const auto rank = static_cast<int>(shape.size());
  const int dim = rank == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(rank));
  const auto d = static_cast<size_t>(dim);
  switch (random() % 6) {
    case 0:
      return builder.stack(static_cast<int>(random() % static_cast<unsigned>(rank + 1)), {in, in});
    case 1: return builder.cat(dim, {in, in});
    case 2: {
      const auto start = static_cast<int64_t>(random() % static_cast<unsigned>(shape[d]));
      const auto n = 1 + static_cast<int64_t>(random() % static_cast<unsigned>(shape[d] - start));
      return builder.slice(dim, start, start + n, in);
    }
    case 3: {
      std::vector<int64_t> dims(shape.size());
      std::iota(dims.begin(), dims.end(), 0);
      std::shuffle(dims.begin(), dims.end(), random);
      return builder.permute(dims, in);
    }
    case 4: {
      std::vector<int64_t> index(static_cast<size_t>(shape[d]));
      for (int64_t& i : index) i = static_cast<int64_t>(random() % static_cast<unsigned>(shape[d]));
      return builder.gather(dim, index, in);
    }
    default: {
      const int64_t numel = numel_of(shape);
      std::vector<int64_t> sizes;
      int64_t left = numel;
      while (left > 1) {
        int64_t factor = 1 + static_cast<int64_t>(random() % static_cast<unsigned>(left));
        while (left % factor != 0) ++factor;
        sizes.push_back(factor);
        left /= factor;
        if (sizes.size() == 4) break;
      }
      sizes.push_back(left);
      return builder.reshape(sizes, in);
    }
  }
}

// pull_back and element_source agree on every element, for random chains of ops and random boxes.
TEST(Recipe, PullBackAgreesWithElementSource) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    const Manifest manifest = manifest_of({{"a", {2, 3, 4}}, {"b", {6, 2}}, {"c", {5}}});
    RecipeBuilder builder(manifest);
    std::vector<std::vector<int64_t>> shapes;
    Recipe probe;  // a finished copy, made after each op: shows the shape of its result
    std::vector<uint32_t> tops = {builder.stored("a"), builder.stored("b"), builder.stored("c")};
    uint32_t top = tops[seed % 3];
    std::vector<int64_t> shape = manifest.tensors[seed % 3].spec.shape;
    const int depth = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < depth && shape.size() < 6 && numel_of(shape) < 200; ++i) {
      top = random_op(builder, top, random,
                      [&](uint32_t) -> const std::vector<int64_t>& { return shape; });
      RecipeBuilder copy = builder;
      copy.target("t", top);
      for (const uint32_t other : tops) copy.target("u" + std::to_string(other), other);
      probe = copy.finish();
      shape = probe.nodes[top].shape;
    }
    if (numel_of(shape) == 0) continue;
    for (int i = 0; i < 12; ++i) expect_box_agrees(probe, top, random_box(shape, random));
    // A flat cut, as over a view of one dim.
    Box flat;
    const int64_t numel = numel_of(shape);
    const int64_t lo = numel / 3;
    flat.push({numel, lo, numel - numel / 4, 1});
    const auto got = pulled(probe, top, flat, flat.numel());
    for (int64_t i = 0; i < flat.numel(); ++i) {
      ASSERT_EQ(got[static_cast<size_t>(i)], by_element(probe, top, lo + i)) << "seed " << seed;
    }
  }
}

// [8, 3, 5] over [4, 6, 5]: 8 x 3 = 4 x 6 is one group of dims and 5 another, so that some columns
// of all rows remain one box.
TEST(Recipe, AReshapeMovesIndicesOnlyWithinShortGroups) {
  const Manifest manifest = manifest_of({{"a", {5, 6, 5}}});
  RecipeBuilder builder(manifest);
  const uint32_t top = builder.reshape({8, 3, 5}, builder.slice(0, 1, 5, builder.stored("a")));
  builder.target("t", top);
  const Recipe recipe = builder.finish();
  Box box;
  box.push({8, 0, 8, 6});
  box.push({3, 0, 3, 2});
  box.push({5, 1, 3, 1});
  int boxes = 0;
  pull_back(recipe, top, box, [&](const Node&, const Box& part) {
    ++boxes;
    EXPECT_EQ(part.numel(), 48);
  });
  EXPECT_EQ(boxes, 1);
}

// Experts' gate and up, stacked and concatenated: element (e, row, col) of gate_up is from gate[e]
// in the first rows and from up[e] in the other rows. Catches: swapped gate and up.
TEST(Recipe, ExpertsStackAndConcatenate) {
  const Manifest manifest = manifest_of(
      {{"e.0.gate", {2, 3}}, {"e.0.up", {2, 3}}, {"e.1.gate", {2, 3}}, {"e.1.up", {2, 3}}});
  RecipeBuilder builder(manifest);
  const uint32_t gates = builder.stack(0, {builder.stored("e.0.gate"), builder.stored("e.1.gate")});
  const uint32_t ups = builder.stack(0, {builder.stored("e.0.up"), builder.stored("e.1.up")});
  const uint32_t both = builder.cat(1, {gates, ups});
  builder.target("gate_up", both);
  const Recipe recipe = builder.finish();
  EXPECT_EQ(recipe.targets[0].spec.shape, (std::vector<int64_t>{2, 4, 3}));
  const auto got = pulled(recipe, both, whole_box({2, 4, 3}), 24);
  EXPECT_EQ(got[0], (Source{0, 0}));   // gate of expert 0
  EXPECT_EQ(got[6], (Source{1, 0}));   // up of expert 0
  EXPECT_EQ(got[12], (Source{2, 0}));  // gate of expert 1
  EXPECT_EQ(got[23], (Source{3, 5}));  // the last element of up of expert 1
  EXPECT_EQ(stored_under(recipe, both), (std::vector<uint32_t>{0, 1, 2, 3}));
}

TEST(Recipe, IdentityAddsATieAsAnAlias) {
  const Manifest manifest = manifest_of({{"model.embed_tokens.weight", {4, 2}}, {"norm", {2}}});
  const Recipe recipe = identity_recipe(manifest, word_embedding_ties(manifest));
  ASSERT_EQ(recipe.targets.size(), 3U);
  EXPECT_EQ(recipe.targets[2].spec.fqn, "lm_head.weight");
  EXPECT_TRUE(recipe.is_alias(2));
  EXPECT_FALSE(recipe.is_alias(0));
  EXPECT_EQ(recipe.targets[2].spec.shape, (std::vector<int64_t>{4, 2}));
  EXPECT_FALSE(recipe.is_compared(2));
}

// A head that is stored too is compared with the embedding.
TEST(Recipe, ATieStoredUnderBothNamesIsCompared) {
  const Manifest both =
      manifest_of({{"lm_head.weight", {4}}, {"norm", {2}}, {"model.embed_tokens.weight", {4}}});
  const Recipe recipe = make_recipe(both, {.tie_word_embeddings = true});
  ASSERT_EQ(recipe.targets.size(), 3U);
  EXPECT_EQ(recipe.targets[2].spec.fqn, "lm_head.weight");
  ASSERT_TRUE(recipe.is_compared(2));
  EXPECT_EQ(recipe.nodes[recipe.targets[2].root].from, 1U);
  EXPECT_EQ(recipe.nodes[recipe.read_node(2)].from, 0U);
  EXPECT_EQ(stored_under(recipe, recipe.targets[2].root), (std::vector<uint32_t>{0}));
  const std::string text = recipe_text(recipe, both);
  EXPECT_EQ(recipe_text(parse_recipe(text, both), both), text);

  const Recipe untied = make_recipe(both, {.tie_word_embeddings = true, .untie = true});
  const Recipe untied_text = parse_recipe(text, both, true);
  for (const Recipe& two : {untied, untied_text}) {
    ASSERT_EQ(two.targets.size(), 3U);
    for (size_t t = 0; t < 3; ++t) EXPECT_FALSE(two.is_alias(t));
  }
  EXPECT_EQ(make_recipe(both).targets.size(), 3U);

  const Manifest unlike =
      manifest_of({{"lm_head.weight", {5}}, {"model.embed_tokens.weight", {4}}});
  std::string tensor;
  EXPECT_EQ(category_of([&] { make_recipe(unlike, {.tie_word_embeddings = true}); }, &tensor),
            Category::mismatch);
  EXPECT_EQ(tensor, "lm_head.weight");
  EXPECT_EQ(category_of([&] { make_recipe(unlike, {.tie_word_embeddings = true, .untie = true}); }),
            Category::count);
}

TEST(Recipe, ATiedTensorIsKeptInFloat32ByEitherName) {
  const Manifest manifest =
      manifest_of({{"model.embed_tokens.weight", {4}}, {"lm_head.weight", {4}}, {"norm", {2}}});
  for (const char* const keep : {"lm_head", "embed_tokens"}) {
    const Recipe recipe = make_recipe(
        manifest, {.tie_word_embeddings = true, .dtype = DType::bf16, .keep_fp32 = keep});
    std::map<std::string, DType> dtypes;
    for (const Target& target : recipe.targets) dtypes[target.spec.fqn] = target.spec.dtype;
    EXPECT_EQ(dtypes["lm_head.weight"], DType::f32) << keep;
    EXPECT_EQ(dtypes["model.embed_tokens.weight"], DType::f32) << keep;
    EXPECT_EQ(dtypes["norm"], DType::bf16) << keep;
  }
}

// The stored names determine which name of a tie is the alias.
TEST(Recipe, IfOnlyTheHeadIsStoredTheEmbeddingIsItsAlias) {
  const auto tie_of = [](std::vector<std::string> names) -> NamedTie {
    std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;
    for (std::string& name : names) tensors.emplace_back(std::move(name), std::vector<int64_t>{2});
    const auto ties = word_embedding_ties(manifest_of(std::move(tensors)));
    return ties.empty() ? NamedTie{} : ties[0];
  };
  const std::string head = "lm_head.weight";
  EXPECT_EQ(tie_of({head, "model.layers.0.a", "model.layers.1.a", "model.norm.weight"}),
            (NamedTie{"model.embed_tokens.weight", head}));
  EXPECT_EQ(tie_of({head, "language_model.layers.0.a"}),
            (NamedTie{"language_model.embed_tokens.weight", head}));
  EXPECT_EQ(tie_of({head, "transformer.h.0.ln_1.weight"}),
            (NamedTie{"transformer.wte.weight", head}));
  EXPECT_EQ(tie_of({head, "norm"}), (NamedTie{"model.embed_tokens.weight", head}));
  EXPECT_EQ(
      tie_of({"language_model.lm_head.weight", "language_model.model.embed_tokens.weight"}),
      (NamedTie{"language_model.lm_head.weight", "language_model.model.embed_tokens.weight"}));
  // Two stacks of layers have two embeddings, and the names don't determine which one is tied.
  EXPECT_EQ(tie_of({head, "encoder.layers.0.a", "decoder.layers.0.a"}), NamedTie{});
  EXPECT_EQ(tie_of({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}), NamedTie{});
  EXPECT_EQ(tie_of({"norm"}), NamedTie{});

  const Manifest manifest = manifest_of({{head, {4, 2}}, {"model.layers.0.norm", {2}}});
  const Recipe recipe = make_recipe(manifest, {.tie_word_embeddings = true});
  ASSERT_EQ(recipe.targets.size(), 3U);
  EXPECT_EQ(recipe.targets[2].spec.fqn, "model.embed_tokens.weight");
  EXPECT_TRUE(recipe.is_alias(2));
  EXPECT_FALSE(recipe.is_compared(2));
}

// The second name of a tie has the dtype of the first, even if it is untied.
TEST(Recipe, UntyingKeepsTheCast) {
  const Manifest manifest = manifest_of({{"a", {2}}, {"b", {2}}});
  const std::string text = R"({"targets": {
    "a": {"op":"stored","name":"a","dtype":"bfloat16"},
    "b": {"op":"alias","of":"a","in":[{"op":"stored","name":"b"}]}}, "unused": []})";
  EXPECT_EQ(parse_recipe(text, manifest).targets[1].spec.dtype, DType::bf16);
  EXPECT_EQ(parse_recipe(text, manifest, true).targets[1].spec.dtype, DType::bf16);
}

TEST(Recipe, TextFormSurvivesARoundTrip) {
  const Manifest manifest = manifest_of({{"a", {2, 3}}, {"b", {2, 3}}, {"spare", {1}}});
  const std::string text = R"({"targets": {
    "cat": {"op":"cat","dim":0,"in":[{"op":"stored","name":"a"},{"op":"stored","name":"b"}]},
    "rows": {"op":"gather","dim":0,"index":[1,0],"in":[{"op":"stored","name":"a"}]},
    "turned": {"op":"permute","dims":[1,0],"in":[{"op":"slice","dim":0,"start":1,"stop":2,
               "in":[{"op":"stored","name":"b"}]}]},
    "flat": {"op":"reshape","shape":[6],"in":[{"op":"stored","name":"a"}],"dtype":"bfloat16"},
    "fresh": {"op":"init","rule":"normal","std":0.02,"shape":[2,2],"dtype":"float32"},
    "again": {"op":"alias","of":"cat"}}, "unused": ["spare"]})";
  const Recipe recipe = parse_recipe(text, manifest);
  EXPECT_EQ(recipe.targets.size(), 6U);
  EXPECT_EQ(recipe.targets[3].spec.dtype, DType::bf16);
  EXPECT_EQ(recipe.unused, (std::vector<uint32_t>{2}));
  const std::string written = recipe_text(recipe, manifest);
  EXPECT_EQ(recipe_text(parse_recipe(written, manifest), manifest), written);
}

// The values of `init` are rounded to its own dtype before they are cast.
TEST(Recipe, TextKeepsTheDtypeOfACastInit) {
  const Manifest manifest;
  RecipeBuilder builder(manifest);
  builder.target("w", builder.init(InitRule::normal, 0.02, {2, 3}, DType::bf16), DType::f32);
  builder.target("c", builder.caller(0, {4}, DType::f16), DType::f32);
  const Recipe recipe = builder.finish();
  const Recipe reread = parse_recipe(recipe_text(recipe, manifest), manifest);
  ASSERT_EQ(reread.targets.size(), 2U);
  for (size_t t = 0; t < 2; ++t) {
    EXPECT_EQ(reread.targets[t].spec.dtype, DType::f32);
    EXPECT_EQ(reread.nodes[reread.targets[t].root].dtype,
              recipe.nodes[recipe.targets[t].root].dtype);
  }
}

TEST(Recipe, InvalidRecipesAreRefusedByTarget) {
  const Manifest manifest = manifest_of({{"a", {2, 3}}, {"b", {2, 4}}});
  const auto parse = [&](const std::string& targets, const std::string& unused = "[]") {
    return [&manifest, targets, unused] {
      parse_recipe(R"({"targets":{)" + targets + R"(},"unused":)" + unused + "}", manifest);
    };
  };
  const std::string a = R"("a":{"op":"stored","name":"a"})";
  std::string tensor;
  EXPECT_EQ(category_of(parse(a), &tensor), Category::mismatch);  // b is neither used nor listed
  EXPECT_EQ(tensor, "b");
  EXPECT_EQ(category_of(parse(a, R"(["b"])")), Category::count);
  EXPECT_EQ(category_of(parse(a, R"(["a","b"])"), &tensor), Category::mismatch);  // both
  EXPECT_EQ(category_of(parse(a, R"(["b","c"])"), &tensor), Category::mismatch);
  EXPECT_EQ(tensor, "c");
  EXPECT_EQ(category_of(parse(R"("t":{"op":"stored","name":"aa"})"), &tensor), Category::mismatch);
  EXPECT_EQ(tensor, "aa");
  EXPECT_EQ(category_of(parse(R"("t":{"op":"cat","dim":0,"in":[{"op":"stored","name":"a"},
                                 {"op":"stored","name":"b"}]})"),
                        &tensor),
            Category::mismatch);  // shapes differ
  EXPECT_EQ(tensor, "t");
  EXPECT_EQ(category_of(parse(R"("t":{"op":"rotate","in":[]})"), &tensor), Category::unsupported);
  EXPECT_EQ(tensor, "t");
  EXPECT_EQ(category_of(parse(R"("t":{"op":"stored","file":"x"})"), &tensor), Category::mismatch);
  EXPECT_EQ(tensor, "t") << "an unknown key";
  EXPECT_EQ(category_of(parse(a + R"(,"t":{"op":"alias","of":"absent"})", R"(["b"])")),
            Category::mismatch);
  EXPECT_EQ(category_of([&] { parse_recipe("{\"targets\":{", manifest); }), Category::mismatch);
  EXPECT_EQ(category_of([&] { parse_recipe("{}", manifest); }), Category::mismatch);
}

std::string error_of(FunctionRef<void(RecipeBuilder&)> call, const Manifest& manifest) {
  RecipeBuilder builder(manifest);
  try {
    call(builder);
    builder.finish();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Recipe, AnErrorNamesTheWrongDimDtypeOrShape) {
  const std::vector<int64_t> nine(9, 1);
  Manifest manifest = manifest_of({{"a", {2, 3}}, {"b", {5, 4}}, {"ids", {2, 3}}, {"nine", nine}});
  manifest.tensors[2].spec.dtype = DType::i64;
  const auto error = [&](FunctionRef<void(RecipeBuilder&)> call) {
    return error_of(call, manifest);
  };
  EXPECT_EQ(error([](RecipeBuilder& r) { r.slice(2, 0, 1, r.stored("a")); }),
            "MISMATCH: 'slice' along a dim that its input does not have (expected a dim in [0, 2), "
            "got 2)");
  EXPECT_EQ(error([](RecipeBuilder& r) { r.stack(-1, {r.stored("a")}); }),
            "MISMATCH: 'stack' along a dim that its output does not have (expected a dim in "
            "[0, 2], got -1)");
  EXPECT_EQ(error([](RecipeBuilder& r) { r.slice(0, 0, 1, r.stored("nine")); }),
            "UNSUPPORTED: 'slice' of a tensor of more than 8 dims (got [1, 1, 1, 1, 1, 1, 1, 1, "
            "1])");
  EXPECT_EQ(error([](RecipeBuilder& r) {
              r.permute({8, 7, 6, 5, 4, 3, 2, 1, 0}, r.stored("nine"));
            }),
            "UNSUPPORTED: 'permute' of a tensor of more than 8 dims (got [1, 1, 1, 1, 1, 1, 1, 1, "
            "1])");
  EXPECT_EQ(error([](RecipeBuilder& r) {
              r.permute({1, 1}, r.stored("a"));
            }),
            "MISMATCH: 'permute' does not name each dim once (expected [0, 1] in any order, got "
            "[1, 1])");
  const std::string cat =
      "MISMATCH: 'cat' along dim 0 of tensors that differ in dtype or another "
      "dim (expected float32 [2, 3], got ";
  EXPECT_EQ(error([](RecipeBuilder& r) {
              r.cat(0, {r.stored("a"), r.stored("b")});
            }),
            cat + "float32 [5, 4])");
  EXPECT_EQ(error([](RecipeBuilder& r) {
              r.cat(0, {r.stored("a"), r.stored("ids")});
            }),
            cat + "int64 [2, 3])");
  EXPECT_EQ(error([](RecipeBuilder& r) {
              r.stack(0, {r.stored("a"), r.stored("ids")});
            }),
            "MISMATCH: 'stack' of tensors that differ in dtype or shape (expected float32 [2, 3], "
            "got int64 [2, 3])");
  EXPECT_EQ(error([](RecipeBuilder& r) { r.target("t", r.stored("ids"), DType::f32); }),
            "UNSUPPORTED: a cast from int64 to float32 (tensor t, expected a cast from float32, "
            "bfloat16, float16 or FP8 codes with scales)");
}

TEST(RecipeText, AMissingKeyOrUnknownValueIsNamed) {
  const Manifest manifest = manifest_of({{"a", {2, 3}}});
  const auto error = [&](const std::string& node) -> std::string {
    try {
      parse_recipe(R"({"targets":{"t":)" + node + "}}", manifest);
    } catch (const Error& refused) {
      return refused.what();
    }
    return "";
  };
  EXPECT_EQ(error(R"({"op":"stored"})"), "MISMATCH: 'stored' lacks its 'name' (tensor t)");
  EXPECT_EQ(error(R"({"op":"alias"})"), "MISMATCH: 'alias' lacks its 'of' (tensor t)");
  EXPECT_EQ(error(R"({"op":"rotate"})"),
            "UNSUPPORTED: an unknown op 'rotate' (tensor t, expected stored, cat, stack, slice, "
            "permute, gather, reshape, init, caller, alias)");
  EXPECT_EQ(error(R"({"op":"init","rule":"twos","shape":[2],"dtype":"float32"})"),
            "UNSUPPORTED: an unknown init rule 'twos' (tensor t, expected zeros, ones, normal)");
}

TEST(Recipe, AnUnknownNameIsRefusedWithTheNearestOne) {
  const Manifest manifest = manifest_of({{"norm.weight", {2}}});
  EXPECT_EQ(error_of([](RecipeBuilder& r) { r.stored("nrom.weight"); }, manifest),
            "MISMATCH: the recipe names a tensor that the checkpoint does not hold; nearest is "
            "'norm.weight' (tensor nrom.weight)");
  EXPECT_EQ(error_of([](RecipeBuilder& r) { r.unused("norm.wieght"); }, manifest),
            "MISMATCH: the recipe lists as unused a tensor that the checkpoint does not hold; "
            "nearest is 'norm.weight' (tensor norm.wieght)");
  EXPECT_EQ(error_of(
                [](RecipeBuilder& r) {
                  r.target("norm.weight", r.stored("norm.weight"));
                  r.alias("first", "norm.weight");
                  r.alias("second", "first");
                },
                manifest),
            "MISMATCH: an alias of 'first', which is itself an alias or not a target (tensor "
            "second)");
}

TEST(Recipe, ATargetOrAliasWithoutANameIsRefused) {
  const Manifest manifest = manifest_of({{"a", {2, 3}}});
  const std::string node = R"({"op":"stored","name":"a"})";
  for (const std::string& targets :
       {R"("":)" + node, R"("a":)" + node + R"(,"":{"op":"alias","of":"a"})"}) {
    EXPECT_EQ(category_of([&] {
                parse_recipe(R"({"targets":{)" + targets + R"(},"unused":[]})", manifest);
              }),
              Category::mismatch)
        << targets;
  }
}

TEST(Recipe, DtypesAreSetOnCastableTargets) {
  Manifest manifest = manifest_of({{"w", {2}}, {"norm.scale", {2}}, {"ids", {2}}}, DType::bf16);
  manifest.tensors[2].spec.dtype = DType::i64;
  Recipe recipe = identity_recipe(manifest);
  set_dtype(recipe, DType::f16, "norm\\.");
  EXPECT_EQ(recipe.targets[0].spec.dtype, DType::f16);
  EXPECT_EQ(recipe.targets[1].spec.dtype, DType::f32);
  EXPECT_EQ(recipe.targets[2].spec.dtype, DType::i64);
  EXPECT_EQ(category_of([&] { set_dtype(recipe, std::nullopt, "("); }), Category::usage);
}

TEST(Recipe, ACastOfIntegersIsRefused) {
  const Manifest manifest = manifest_of({{"ids", {2}}}, DType::i64);
  RecipeBuilder builder(manifest);
  const uint32_t ids = builder.stored("ids");
  EXPECT_EQ(category_of([&] { builder.target("ids", ids, DType::f32); }), Category::unsupported);
}

// Each of kJsonValues at every key of every op is read, or refused with an Error of exit code 2.
TEST(RecipeText, AnyJsonAtAnyKeyIsReadOrRefused) {
  const Manifest manifest = manifest_of({{"a.b", {2, 3}}});
  const std::map<std::string, std::string> members = {
      {"op", ""},
      {"name", R"("a.b")"},
      {"of", R"("a.b")"},
      {"rule", R"("normal")"},
      {"dtype", R"("float32")"},
      {"dim", "0"},
      {"start", "0"},
      {"stop", "1"},
      {"std", "1"},
      {"dims", "[1, 0]"},
      {"index", "[1]"},
      {"shape", "[3, 2]"},
      {"in", R"([{"op": "stored", "name": "a.b"}])"},
      {"unknown", "1"}};
  const auto expect_read_or_refused = [&](const std::string& text) {
    try {
      parse_recipe(text, manifest);
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.category()), 2) << text << ": " << error.what();
    }
  };
  for (const char* value : kJsonValues) {
    for (const std::string& recipe :
         {std::string(value), R"({"targets": )" + std::string(value) + "}",
          R"({"targets": {"t": )" + std::string(value) + "}}",
          R"({"targets": {}, "unused": )" + std::string(value) + "}",
          R"({"targets": {}, "unused": [)" + std::string(value) + "]}",
          R"({"targets": {}, "unknown": )" + std::string(value) + "}"}) {
      expect_read_or_refused(recipe);
    }
    for (const char* op : {"stored", "cat", "stack", "slice", "permute", "gather", "reshape",
                           "init", "caller", "alias", "unknown"}) {
      for (const auto& [key, unused] : members) {
        std::string node = R"({"op": )" + (key == "op" ? value : "\"" + std::string(op) + "\"");
        for (const auto& [name, usual] : members) {
          if (name == "op" || (name == "unknown" && key != "unknown")) continue;
          node += ", \"" + name + "\": " + (name == key ? value : usual);
        }
        expect_read_or_refused(R"({"targets": {"t": )" + node + "}}}");
      }
    }
  }
}

// The error of parse_recipe for one target without stored tensors.
std::optional<Error> refusal_of(const std::string& target) {
  try {
    parse_recipe("{\"targets\":{" + target + "}}", {});
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Recipe, RefusesDimsWhoseProductOverflows) {
  const auto init = [](const std::string& shape, const std::string& dtype = "float32") {
    return R"({"op":"init","rule":"zeros","dtype":")" + dtype + R"(","shape":)" + shape + "}";
  };
  for (const char* shape :
       {"[4611686018427387905]", "[4611686018427387904]", "[4294967296,4294967296,4294967296]",
        "[288230376151711745]", "[0,4611686018427387904,4]"}) {
    const auto refusal = refusal_of("\"t\":" + init(shape));
    ASSERT_TRUE(refusal) << shape;
    EXPECT_EQ(refusal->category(), Category::mismatch) << shape;
    EXPECT_EQ(refusal->facts().tensor, "t") << shape;
    EXPECT_NE(refusal->facts().expected, "") << shape;
    EXPECT_NE(refusal->facts().got, "") << shape;
  }
  EXPECT_FALSE(refusal_of("\"t\":" + init("[288230376151711744]"))) << "1 EiB";
  EXPECT_FALSE(refusal_of("\"t\":" + init("[0,4611686018427387904]")));
  EXPECT_TRUE(refusal_of("\"a\":" + init("[288230376151711744]") + ",\"b\":" + init("[1]")));
  const std::string large = init("[9223372036854775807,0]");
  EXPECT_TRUE(refusal_of(R"("t":{"op":"cat","dim":0,"in":[)" + large + "," + large + "]}"));
}

// A cast is checked against the limit too: 0.5 EiB of bf16 is 1 EiB of fp32, exactly the limit.
// The target has one element more.
TEST(Recipe, ADTypeThatMakesTargetsTooLargeIsRefused) {
  const Manifest nothing;
  RecipeBuilder builder(nothing);
  const int64_t most = int64_t{1} << 58;
  builder.target("t", builder.init(InitRule::ones, 0, {most + 1}, DType::bf16));
  Recipe recipe = builder.finish();
  std::string tensor;
  EXPECT_EQ(category_of([&] { set_dtype(recipe, DType::f32, ""); }, &tensor), Category::mismatch);
  EXPECT_EQ(tensor, "t");
}

TEST(Recipe, RefusesMisplacedDtypesAndInvalidRules) {
  const std::string ones = R"({"op":"init","rule":"ones","shape":[2],"dtype":"float32"})";
  const auto normal = [](const std::string& std) {
    return R"("t":{"op":"init","rule":"normal","std":)" + std +
           R"(,"shape":[2],"dtype":"float32"})";
  };
  const auto slice = [&](const std::string& more) {
    return R"({"op":"slice","dim":0,"start":0,"stop":2,"in":[)" + ones + "]" + more + "}";
  };
  const auto stacked = [](const std::string& in) {
    return R"("t":{"op":"stack","dim":0,"in":[)" + in + "]}";
  };
  EXPECT_FALSE(refusal_of(normal("0.5")));
  EXPECT_FALSE(refusal_of(normal("0")));
  EXPECT_FALSE(refusal_of(stacked(slice(""))));
  const auto category = [](const std::string& target) {
    const auto refusal = refusal_of(target);
    return refusal ? refusal->category() : Category::count;
  };
  EXPECT_EQ(category(normal("-0.5")), Category::mismatch);
  EXPECT_EQ(category(stacked(slice(R"(,"dtype":"bfloat16")"))), Category::mismatch);
  EXPECT_EQ(category("\"t\":" + ones + R"(,"u":{"op":"alias","of":"t","dtype":"float16"})"),
            Category::mismatch);
  EXPECT_EQ(category("\"\":" + ones), Category::mismatch);
  EXPECT_EQ(category("\"t\":" + ones + R"(,"":{"op":"alias","of":"t"})"), Category::mismatch);
  EXPECT_EQ(
      category(R"("t":{"op":"slice","dim":-4294967296,"start":0,"stop":2,"in":[)" + ones + "]}"),
      Category::mismatch)
      << "a negative dim that wraps to 0";
}

}  // namespace
}  // namespace modicum
