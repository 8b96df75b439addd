// Attack: recipes with dims up to 2^63-1. Each is refused with a typed error, or its promise is at
// least the true size of its targets. This test computes that size in 128 bits from the shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>

#include "modicum/plan/plan.h"
#include "modicum/plan/traffic_double.h"

namespace modicum {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int64_t kTwoTo62 = int64_t{1} << 62;

Manifest small_manifest() {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors"});
  const auto add = [&](const char* name, DType dtype, std::vector<int64_t> shape) {
    const uint64_t bytes = bytes_of(dtype, numel_of(shape));
    const uint64_t begin = manifest.tensors.empty() ? 800 : manifest.tensors.back().at.end;
    manifest.tensors.push_back(
        {{name, Role::param, dtype, std::move(shape)}, {0, begin, begin + bytes}});
  };
  add("matrix", DType::f32, {4, 6});
  add("vector", DType::bf16, {12});
  add("nothing", DType::f32, {0, kTwoTo62});
  return manifest;
}

// A chain of random ops over random leaves.
class RandomRecipe {
 public:
  RandomRecipe(const Manifest& manifest, std::mt19937_64& random)
      : random_(random), builder_(manifest) {}

  Recipe make() {
    for (const char* name : {"matrix", "vector", "nothing"}) {
      builder_.target(name, builder_.stored(std::string_view(name)));
    }
    const auto targets = 1 + below(4);
    for (uint64_t t = 0; t < targets; ++t) {
      uint32_t node = leaf();
      const uint64_t ops = below(5);
      for (uint64_t i = 0; i < ops; ++i) node = op(node);
      const std::string fqn = "made." + std::to_string(t);
      const bool is_cast = below(3) == 0;
      builder_.target(fqn, node, is_cast ? std::optional(DType::f32) : std::nullopt);
      if (below(4) == 0) builder_.alias(fqn + ".again", fqn);
    }
    return builder_.finish();
  }

 private:
  uint64_t below(uint64_t n) { return random_() % n; }
  // Rarely -1, which is invalid.
  int64_t dim() {
    switch (below(8)) {
      case 0: return static_cast<int64_t>(below(4)) - (below(50) == 0 ? 1 : 0);
      case 1: return static_cast<int64_t>(random_() >> 1);  // up to 2^63-1
      case 2: return INT64_MAX - static_cast<int64_t>(below(3));
      case 3:
      case 4: return (int64_t{1} << below(63)) + static_cast<int64_t>(below(3)) - 1;
      default: return static_cast<int64_t>(1 + below(9));
    }
  }
  std::vector<int64_t> dims() {
    std::vector<int64_t> shape(below(5));
    for (int64_t& size : shape) size = dim();
    return shape;
  }
  uint32_t leaf() {
    static constexpr std::array kDTypes = {DType::f32, DType::bf16, DType::f16};
    if (below(4) == 0) return builder_.stored(static_cast<uint32_t>(below(3)));
    return builder_.init(InitRule::normal, 0.02, dims(), kDTypes[below(3)]);
  }
  // A shape with the same number of elements: dims merged, or one split in two.
  std::vector<int64_t> reshaped(std::vector<int64_t> shape) {
    if (shape.empty() || below(3) == 0) return dims();
    const size_t d = below(shape.size());
    if (below(2) == 0 && d + 1 < shape.size()) {
      const auto product = checked_mul(shape[d], shape[d + 1]);
      shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(d));
      shape[d] = product.value_or(1);
    } else if (shape[d] % 2 == 0) {
      shape[d] /= 2;
      shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(d), 2);
    }
    return shape;
  }
  uint32_t op(uint32_t in) {
    const std::vector<int64_t> shape = builder_.node(in).shape;
    const auto d = static_cast<int>(below(shape.size() + 1));
    const int64_t size = d < static_cast<int>(shape.size()) ? shape[static_cast<size_t>(d)] : 0;
    switch (below(6)) {
      case 0: return builder_.cat(d, {in, below(2) == 0 ? in : leaf(), in});
      case 1: return builder_.stack(d, std::vector<uint32_t>(1 + below(4), in));
      case 2: {
        const int64_t stop = below(2) == 0 ? size : dim();
        return builder_.slice(d, size == 0 ? 0 : static_cast<int64_t>(below(9)) % size, stop, in);
      }
      case 3: {
        std::vector<int64_t> order(shape.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
        std::shuffle(order.begin(), order.end(), random_);
        return builder_.permute(std::move(order), in);
      }
      case 4: {
        const int64_t last = size > 0 ? size - 1 : dim();
        return builder_.gather(d, {0, last, last / 2, 0}, in);
      }
      default: return builder_.reshape(reshaped(shape), in);
    }
  }

  std::mt19937_64& random_;
  RecipeBuilder builder_;
};

// The bytes of all targets, each target's capped at 2^96.
Wide true_bytes(const Recipe& recipe) {
  Wide sum = 0;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    if (recipe.is_alias(t)) continue;
    const TensorSpec& spec = recipe.targets[t].spec;
    Wide bytes = static_cast<Wide>(bytes_per_element(spec.dtype));
    // Each factor is limited so that the product does not exceed 2^126.
    for (const int64_t size : spec.shape) {
      bytes *= std::min<Wide>(static_cast<Wide>(size), (Wide{1} << 126) / std::max<Wide>(1, bytes));
    }
    sum += std::min(bytes, Wide{1} << 96);
  }
  return sum;
}

struct LayoutCase {
  Layout layout;
  Wide copies;  // the number of ranks that hold each element
};

std::vector<LayoutCase> layouts_of(const Recipe& recipe) {
  std::vector<const TensorSpec*> targets;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    targets.push_back(recipe.is_alias(t) ? nullptr : &recipe.targets[t].spec);
  }
  std::vector<LayoutCase> all;
  all.push_back({whole_layout(7), 7});
  all.push_back({fsdp2_layout(5), 1});
  all.push_back({fsdp2_layout(3, 1), 1});
  all.push_back({hsdp_layout(2, {3}), 2});
  all.push_back({tp_fsdp_layout({2}, 3), 1});
  all.push_back({zero3_layout(4, targets), 1});
  all.push_back({flat_layout("zero1", 4, targets, false), 1});
  all.push_back({flat_layout("zero2", 3, targets, true), 1});
  return all;
}

struct Outcome {
  int refused = 0, planned = 0, over_a_pebibyte = 0;
};

void expect_true_promise(const Recipe& recipe, const Manifest& manifest, Outcome& outcome) {
  const Wide bytes = true_bytes(recipe);
  const auto pebibytes = static_cast<uint64_t>(bytes >> 50);
  outcome.over_a_pebibyte += pebibytes > 0 ? 1 : 0;
  for (const LayoutCase& layout_case : layouts_of(recipe)) {
    for (const Strategy& strategy : strategies()) {
      std::optional<Plan> plan;
      try {
        plan = make_plan(manifest, recipe, layout_case.layout, {.strategy = &strategy});
      } catch (const Error& error) {
        // The only valid reason for a refusal: the sum over the ranks is too large.
        ASSERT_EQ(error.category(), Category::mismatch) << error.what();
        ASSERT_GT(bytes * layout_case.copies, Wide{1} << 62) << error.what();
        continue;
      }
      const uint64_t promised = plan->promise.node_peak_bytes(0);
      ASSERT_GE(promised, bytes * layout_case.copies)
          << layout_case.layout.name << " " << strategy.name;
      ASSERT_EQ(fits(plan->promise, {promised - 1, "flag"}), false);
      ASSERT_EQ(fits(plan->promise, {kGiB, "flag"}), promised <= kGiB);
      traffic_of_rank(*plan, plan->ranks() - 1);
    }
  }
}

Outcome try_recipes(uint64_t seed, int count) {
  const Manifest manifest = small_manifest();
  std::mt19937_64 random(seed);
  Outcome outcome;
  for (int i = 0; i < count && !testing::Test::HasFatalFailure(); ++i) {
    std::optional<Recipe> recipe;
    try {
      recipe = RandomRecipe(manifest, random).make();
    } catch (const Error& error) {
      EXPECT_TRUE(error.category() == Category::mismatch ||
                  error.category() == Category::unsupported)
          << error.what();
      ++outcome.refused;
      continue;
    }
    expect_true_promise(*recipe, manifest, outcome);
    ++outcome.planned;
  }
  return outcome;
}

TEST(HugeRecipes, AreRefusedOrCountedInFull) {
  const Outcome outcome = try_recipes(1, 5000);
  EXPECT_GT(outcome.refused, 500);
  EXPECT_GT(outcome.planned, 500);
  EXPECT_GT(outcome.over_a_pebibyte, 20);
}

// Runs with --gtest_also_run_disabled_tests only.
TEST(HugeRecipes, DISABLED_AHundredThousandAreRefusedOrCountedInFull) { try_recipes(2, 100000); }

TEST(HugeRecipes, AHugeValidRecipeIsPlannedAndDoesNotFit) {
  const Manifest manifest = small_manifest();
  RecipeBuilder builder(manifest);
  for (const char* name : {"matrix", "vector", "nothing"}) builder.unused(name);
  const int64_t large = int64_t{1} << 40;
  builder.target("large", builder.init(InitRule::zeros, 0, {large}, DType::f32));
  const Recipe recipe = builder.finish();
  const Plan plan =
      make_plan(manifest, recipe, fsdp2_layout(2), {.strategy = &strategy_named("own-shard")});
  EXPECT_GE(plan.promise.node_peak_bytes(0), uint64_t{4} << 40);
  EXPECT_LT(plan.promise.node_peak_bytes(0), uint64_t{5} << 40);
  EXPECT_FALSE(fits(plan.promise, {kGiB, "flag"}));
}

// In 64 bits the bytes of the first two wrap to 4 and 0. The third has two targets of 2^60 bytes,
// kMaxModelBytes each.
TEST(HugeRecipes, SizesThatWrapAreRefusedByName) {
  const Manifest manifest = small_manifest();
  const auto refused = [&](const std::vector<std::vector<int64_t>>& shapes) {
    try {
      RecipeBuilder builder(manifest);
      for (const char* name : {"matrix", "vector", "nothing"}) builder.unused(name);
      for (size_t i = 0; i < shapes.size(); ++i) {
        builder.target("made." + std::to_string(i),
                       builder.init(InitRule::zeros, 0, shapes[i], DType::f32));
      }
      builder.finish();
    } catch (const Error& error) {
      return error.category() == Category::mismatch && !error.facts().expected.empty() &&
             !error.facts().got.empty();
    }
    return false;
  };
  EXPECT_TRUE(refused({{kTwoTo62 + 1}}));
  EXPECT_TRUE(refused({{kTwoTo62}}));
  EXPECT_TRUE(refused({{int64_t{1} << 58}, {int64_t{1} << 58}}));
  EXPECT_TRUE(refused({{0, kTwoTo62, 4}})) << "a stride would overflow";
  EXPECT_TRUE(refused({{-1}}));
  EXPECT_FALSE(refused({{0, kTwoTo62}}));
  EXPECT_FALSE(refused({{int64_t{1} << 58}}));
}

// A permutation splits the initialised tensor into 2^42 runs. A plan must not iterate over the runs
// of a tensor that is not read.
TEST(HugeRecipes, APlanDoesNotIterateOverInitialisedTensors) {
  const Manifest manifest = small_manifest();
  RecipeBuilder builder(manifest);
  for (const char* name : {"matrix", "nothing"}) builder.unused(name);
  const int64_t n = int64_t{1} << 14;
  uint32_t node = builder.init(InitRule::normal, 1, {n, n, n, 12}, DType::bf16);
  node = builder.permute({3, 2, 1, 0}, builder.reshape({n, n, n, 12}, node));
  node = builder.permute({1, 0}, builder.reshape({12 * n, n * n}, node));
  builder.target("made", builder.slice(0, 0, 12, node));
  builder.target("both", builder.cat(0, {builder.reshape({12, 1}, builder.stored("vector")),
                                         builder.slice(1, 0, 1, node)}));
  const Recipe recipe = builder.finish();
  for (const Strategy& strategy : strategies()) {
    const Plan plan = make_plan(manifest, recipe, fsdp2_layout(2, 1), {.strategy = &strategy});
    EXPECT_EQ(traffic(plan).storage_read_bytes,
              strategy.reader == Reader::every_rank && strategy.of_reader != Window::none ? 48 : 24)
        << strategy.name;
  }
}

// The number of ranks comes from the user, too.
TEST(HugeRecipes, ASumOverRanksThatOverflowsIsRefused) {
  const Manifest manifest = small_manifest();
  RecipeBuilder builder(manifest);
  for (const char* name : {"matrix", "vector", "nothing"}) builder.unused(name);
  builder.target("large", builder.init(InitRule::ones, 0, {int64_t{1} << 58}, DType::f32));
  const Recipe recipe = builder.finish();
  for (const int ranks : {8, 16, 64}) {  // sums just over 2^63, of 2^64 (wraps to 0), and of 2^66
    try {
      make_plan(manifest, recipe, whole_layout(ranks), {.strategy = &strategy_named("own-shard")});
      ADD_FAILURE() << ranks << " ranks are promised";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::mismatch);
      EXPECT_EQ(error.facts().tensor, "large");
    }
  }
}

}  // namespace
}  // namespace modicum
