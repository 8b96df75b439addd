// inverse_recipe: from targets back to stored tensors.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

Manifest manifest_of(std::vector<std::pair<std::string, std::vector<int64_t>>> tensors,
                     DType dtype = DType::f32) {
  Manifest manifest;
  for (auto& [name, shape] : tensors) {
    manifest.tensors.push_back({{name, Role::param, dtype, shape}, {}});
  }
  return manifest;
}

using Id = std::pair<uint32_t, int64_t>;  // stored tensor, element

// The stored elements that some target holds.
std::set<Id> held_by_targets(const Recipe& recipe) {
  std::set<Id> held;
  for (const Target& target : recipe.targets) {
    for (int64_t i = 0; i < numel_of(target.spec.shape); ++i) {
      const ElementSource source = element_source(recipe, target.root, i);
      if (source.leaf->op == Op::stored) held.emplace(source.leaf->from, source.first);
    }
  }
  return held;
}

// Follows each element of each tensor that `back` assembles through a target to a stored element,
// and expects the same element of the same stored tensor.
void expect_identity(const Recipe& recipe, const Recipe& back, const Manifest& manifest) {
  std::vector<uint32_t> used;
  for (uint32_t s = 0; s < manifest.tensors.size(); ++s) {
    if (!std::binary_search(recipe.unused.begin(), recipe.unused.end(), s)) used.push_back(s);
  }
  ASSERT_EQ(back.targets.size(), used.size());
  for (size_t i = 0; i < used.size(); ++i) {
    ASSERT_EQ(back.targets[i].spec, manifest.tensors[used[i]].spec);
    for (int64_t e = 0; e < numel_of(back.targets[i].spec.shape); ++e) {
      const ElementSource there = element_source(back, back.targets[i].root, e);
      ASSERT_EQ(there.leaf->op, Op::stored);
      const ElementSource here =
          element_source(recipe, recipe.targets[there.leaf->from].root, there.first);
      ASSERT_EQ(here.leaf->op, Op::stored);
      ASSERT_EQ((Id{here.leaf->from, here.first}), (Id{used[i], e}));
    }
  }
}

// A recipe of random ops. The nodes that no op has consumed at the end are the targets.
class RandomRecipe {
 public:
  // `keeps`: no element is dropped, so that the recipe has an inverse.
  RandomRecipe(unsigned seed, bool keeps) : random_(seed), keeps_(keeps) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;
    const int64_t count = below(3) + 1;
    for (int64_t t = 0; t < count; ++t) {
      std::vector<int64_t> shape;
      const int64_t rank = below(4);
      for (int64_t d = 0; d < rank; ++d) shape.push_back(below(5) + 1);
      tensors.emplace_back("t" + std::to_string(t), std::move(shape));
    }
    manifest_ = manifest_of(std::move(tensors));
  }

  Recipe make() {
    RecipeBuilder builder(manifest_);
    builder_ = &builder;
    for (uint32_t t = 0; t < manifest_.tensors.size(); ++t) tops_.push_back(builder.stored(t));
    const int64_t steps = below(12);
    for (int64_t i = 0; i < steps; ++i) step();
    for (size_t i = 0; i < tops_.size(); ++i) builder.target("u" + std::to_string(i), tops_[i]);
    return builder.finish();
  }
  const Manifest& manifest() const { return manifest_; }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  const std::vector<int64_t>& shape_of(uint32_t id) const { return builder_->node(id).shape; }

  void step() {
    const auto which = static_cast<size_t>(below(static_cast<int64_t>(tops_.size())));
    const uint32_t in = tops_[which];
    const std::vector<int64_t> shape = shape_of(in);
    if (numel_of(shape) == 0 || numel_of(shape) > 150) return;
    const auto rank = static_cast<int64_t>(shape.size());
    const int64_t kind = below(8);
    if (kind == 0 && rank < 5) return reshape(which);
    if (kind == 1 && rank < 5) {
      tops_[which] = builder_->stack(static_cast<int>(below(rank + 1)), {in, in});
      return;
    }
    if (rank == 0) return reshape(which);
    const int dim = static_cast<int>(below(rank));
    const int64_t size = shape[static_cast<size_t>(dim)];
    switch (kind) {
      case 2: return permute(which);
      case 3: return join(which, dim);
      case 4: {  // split in two
        const int64_t middle = below(size + 1);
        if (keeps_ || below(2) == 0) tops_.push_back(builder_->slice(dim, middle, size, in));
        tops_[which] = builder_->slice(dim, 0, middle, in);
        return;
      }
      case 5: {  // rows split between two nodes
        std::vector<int64_t> ours, theirs;
        for (int64_t i = 0; i < size; ++i) (below(2) == 0 ? ours : theirs).push_back(i);
        std::shuffle(theirs.begin(), theirs.end(), random_);
        if (keeps_ || below(2) == 0) tops_.push_back(builder_->gather(dim, theirs, in));
        tops_[which] = builder_->gather(dim, ours, in);
        return;
      }
      case 6: {  // rows shuffled, some of them repeated
        std::vector<int64_t> index(static_cast<size_t>(size));
        std::iota(index.begin(), index.end(), 0);
        for (int64_t i = below(3); i > 0; --i) index.push_back(below(size));
        if (!keeps_ && below(2) == 0) index[0] = below(size);
        std::shuffle(index.begin(), index.end(), random_);
        tops_[which] = builder_->gather(dim, index, in);
        return;
      }
      default: return reshape(which);
    }
  }

  void reshape(size_t which) {
    std::vector<int64_t> made;
    int64_t left = numel_of(shape_of(tops_[which]));
    while (left > 1 && made.size() < 4) {
      int64_t factor = 1 + below(left);
      while (left % factor != 0) ++factor;
      made.push_back(factor);
      left /= factor;
    }
    if (left > 1) made.push_back(left);
    tops_[which] = builder_->reshape(made, tops_[which]);
  }

  void permute(size_t which) {
    std::vector<int64_t> dims(shape_of(tops_[which]).size());
    std::iota(dims.begin(), dims.end(), 0);
    std::shuffle(dims.begin(), dims.end(), random_);
    tops_[which] = builder_->permute(dims, tops_[which]);
  }

  // Concatenates a node with another of a matching shape, or with itself.
  void join(size_t which, int dim) {
    std::vector<int64_t> shape = shape_of(tops_[which]);
    shape[static_cast<size_t>(dim)] = 0;
    for (size_t other = 0; other < tops_.size(); ++other) {
      if (other == which || shape_of(tops_[other]).size() != shape.size()) continue;
      std::vector<int64_t> rest = shape_of(tops_[other]);
      rest[static_cast<size_t>(dim)] = 0;
      if (rest != shape) continue;
      tops_[which] = builder_->cat(dim, {tops_[other], tops_[which]});
      tops_.erase(tops_.begin() + static_cast<std::ptrdiff_t>(other));
      return;
    }
    tops_[which] = builder_->cat(dim, {tops_[which], tops_[which]});
  }

  std::mt19937 random_;
  const bool keeps_;
  Manifest manifest_;
  RecipeBuilder* builder_ = nullptr;
  std::vector<uint32_t> tops_;  // the nodes that no op has consumed so far
};

// A round trip maps every element to itself, for random recipes of all index maps. Catches: a slice
// whose part is off by one; a permutation that is not inverted.
TEST(Inverse, RoundTripIsTheIdentity) {
  size_t largest = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomRecipe random(seed, true);
    const Recipe recipe = random.make();
    const Recipe back = inverse_recipe(recipe, random.manifest());
    expect_identity(recipe, back, random.manifest());
    if (testing::Test::HasFatalFailure()) return;
    largest = std::max(largest, back.nodes.size());
  }
  EXPECT_GT(largest, 20U) << "no inverse has many nodes";
}

// A recipe has an inverse if and only if every stored element is in a target. Otherwise the error
// names the tensor.
TEST(Inverse, MissingElementsAreRefusedByName) {
  int refused = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomRecipe random(seed, false);
    const Recipe recipe = random.make();
    const std::set<Id> held = held_by_targets(recipe);
    std::string lost;
    for (uint32_t s = 0; s < random.manifest().tensors.size() && lost.empty(); ++s) {
      const TensorSpec& spec = random.manifest().tensors[s].spec;
      for (int64_t e = 0; e < numel_of(spec.shape); ++e) {
        if (held.count({s, e}) == 0) lost = spec.fqn;
      }
    }
    try {
      const Recipe back = inverse_recipe(recipe, random.manifest());
      ASSERT_EQ(lost, "") << "the recipe has no inverse";
      expect_identity(recipe, back, random.manifest());
    } catch (const Error& error) {
      ASSERT_EQ(error.category(), Category::unsupported) << error.what();
      ASSERT_EQ(error.facts().tensor, lost) << error.what();
      ++refused;
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(refused, 400) << "a tenth of the recipes should have no inverse";
  EXPECT_LT(refused, 3600) << "a tenth of the recipes should have an inverse";
}

std::vector<Op> ops_of(const Recipe& recipe) {
  std::vector<Op> ops;
  for (const Node& node : recipe.nodes) ops.push_back(node.op);
  return ops;
}

// The inverse does not split parts further than the recipe does: that of a packed projection with
// grouped heads has one cat, not one cat per head.
TEST(Inverse, GroupedHeadsAreInvertedAsOneCat) {
  const Manifest manifest = manifest_of({{"qkv", {4 * 6 * 8, 16}}});
  RecipeBuilder b(manifest);
  const auto part = [&](int64_t begin, int64_t end) {
    const uint32_t heads = b.reshape({4, 6, 8, 16}, b.stored("qkv"));
    return b.reshape({4 * (end - begin) * 8, 16}, b.slice(1, begin, end, heads));
  };
  b.target("q", part(0, 4));
  b.target("k", part(4, 5));
  b.target("v", part(5, 6));
  const Recipe recipe = b.finish();
  const Recipe back = inverse_recipe(recipe, manifest);
  expect_identity(recipe, back, manifest);
  const auto ops = ops_of(back);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), Op::cat), 1);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), Op::gather), 0);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), Op::slice), 0);
}

TEST(Inverse, StackedExpertsAreSeparated) {
  const Manifest manifest = manifest_of(
      {{"e.0.gate", {2, 3}}, {"e.0.up", {2, 3}}, {"e.1.gate", {2, 3}}, {"e.1.up", {2, 3}}});
  RecipeBuilder b(manifest);
  const uint32_t gates = b.stack(0, {b.stored("e.0.gate"), b.stored("e.1.gate")});
  const uint32_t ups = b.stack(0, {b.stored("e.0.up"), b.stored("e.1.up")});
  b.target("gate_up", b.permute({0, 2, 1}, b.cat(1, {gates, ups})));
  const Recipe recipe = b.finish();
  const Recipe back = inverse_recipe(recipe, manifest);
  expect_identity(recipe, back, manifest);
  EXPECT_EQ(back.targets[3].spec.fqn, "e.1.up");
}

// The inverse of interleaved rows of two targets is one cat and one gather.
TEST(Inverse, InterleavedRowsAreGathered) {
  const Manifest manifest = manifest_of({{"w", {8, 2}}});
  RecipeBuilder b(manifest);
  b.target("even", b.gather(0, {0, 2, 4, 6}, b.stored("w")));
  b.target("odd", b.gather(0, {1, 3, 5, 7}, b.stored("w")));
  const Recipe recipe = b.finish();
  const Recipe back = inverse_recipe(recipe, manifest);
  expect_identity(recipe, back, manifest);
  EXPECT_EQ(ops_of(back), (std::vector<Op>{Op::stored, Op::stored, Op::cat, Op::gather}));
  EXPECT_EQ(back.nodes.back().arg, (std::vector<int64_t>{0, 4, 1, 5, 2, 6, 3, 7}));
}

// Targets of `init`, and unused stored tensors, are not in the inverse.
TEST(Inverse, StoredNamesDtypesAndBothNamesOfATieAreRestored) {
  Manifest manifest = manifest_of({{"lm_head.weight", {4, 2}},
                                   {"model.embed_tokens.weight", {4, 2}},
                                   {"norm", {2}},
                                   {"none", {0, 4}},
                                   {"spare", {1}}},
                                  DType::bf16);
  RecipeBuilder b(manifest);
  b.target("embed", b.stored("model.embed_tokens.weight"), DType::f32);
  b.target("n", b.stored("norm"));
  b.target("fresh", b.init(InitRule::ones, 0, {3}, DType::f32));
  b.target("none", b.stored("none"));
  b.alias("head", "embed", b.stored("lm_head.weight"));
  b.alias("again", "n");
  b.unused("spare");
  const Recipe recipe = b.finish();
  const Recipe back = inverse_recipe(recipe, manifest);
  ASSERT_EQ(back.targets.size(), 4U);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(back.targets[i].spec, manifest.tensors[i].spec);
  EXPECT_EQ(ops_of(back), std::vector<Op>(4, Op::stored));
  EXPECT_EQ(back.nodes[back.targets[0].root].from, 0U);
  EXPECT_EQ(back.nodes[back.targets[1].root].from, 0U);
  EXPECT_EQ(back.nodes[back.targets[3].root].from, 3U);
  EXPECT_EQ(back.unused, (std::vector<uint32_t>{2, 4, 5}));  // fresh and the aliases
  EXPECT_EQ(lossy_targets(recipe), std::vector<uint32_t>());
  EXPECT_EQ(lossy_targets(back), (std::vector<uint32_t>{0, 1}));  // fp32 to bf16
  const Manifest targets = target_manifest(recipe);
  const std::string text = recipe_text(back, targets);
  EXPECT_EQ(recipe_text(parse_recipe(text, targets), targets), text);
}

TEST(Inverse, PartsInSeveralDTypesAreRefused) {
  const Manifest manifest = manifest_of({{"w", {4, 2}}});
  RecipeBuilder b(manifest);
  b.target("a", b.slice(0, 0, 2, b.stored("w")), DType::bf16);
  b.target("b", b.slice(0, 2, 4, b.stored("w")));
  const Recipe recipe = b.finish();
  try {
    inverse_recipe(recipe, manifest);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::unsupported);
    EXPECT_EQ(error.facts().tensor, "w");
  }
}

// Codes and scales that were loaded unchanged are saved unchanged; dequantised codes are refused.
TEST(Inverse, Fp8CodesAreInvertedOnlyToCodes) {
  Manifest manifest = manifest_of({{"w", {256, 128}}}, DType::f8_e4m3);
  manifest.tensors.push_back({{"w_scale_inv", Role::param, DType::f32, {2, 1}}, {}});
  manifest.tensors[0].scale = BlockScale{1, {128, 128}};
  const Recipe kept = make_recipe(manifest);
  EXPECT_EQ(ops_of(inverse_recipe(kept, manifest)), (std::vector<Op>{Op::stored, Op::stored}));
  const Recipe numbers = make_recipe(manifest, {.dtype = DType::bf16});
  EXPECT_EQ(lossy_targets(numbers), std::vector<uint32_t>{0});
  try {
    inverse_recipe(numbers, manifest);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::unsupported);
    EXPECT_EQ(error.facts().tensor, "w");
  }
}

}  // namespace
}  // namespace modicum
