#include <gtest/gtest.h>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr int kRanks = 4;

Manifest small_manifest() {
  const TensorSpec spec{"a", Role::param, DType::bf16, {1000, 1000}};
  Manifest manifest;
  manifest.files.push_back({"model.safetensors"});
  manifest.tensors.push_back({spec, {0, 0, bytes_of(spec.dtype, numel_of(spec.shape))}});
  return manifest;
}

// A save holds all of --staging in addition to the ring, even with strategies that load without
// staging.
TEST(Budget, StagingOfASaveShrinksAsFarAsNeededAndNoFurther) {
  const Manifest manifest = small_manifest();
  const Recipe recipe = identity_recipe(manifest);
  for (const Strategy& strategy : strategies()) {
    PlanOptions options{.strategy = &strategy};
    options.save = Footprint{};
    (*options.save)[Purpose::header] = 32 * kMiB;  // so that the peak is in the save
    Footprint of_step;                             // not a part of --staging
    of_step[Purpose::staging] = kMiB;
    options.after = {{"step", std::vector<Footprint>(kRanks, of_step)}};
    const auto plan_with = [&](uint64_t staging_bytes) {
      PlanOptions with = options;
      with.staging_bytes = staging_bytes;
      return make_plan(manifest, recipe, fsdp2_layout(kRanks), with);
    };
    const Plan plan = plan_with(8 * kMiB);
    const uint64_t peak = plan.promise.node_peak_bytes(0);
    for (const uint64_t over : {uint64_t{1}, kRanks * 100 * kPageBytes, kRanks * 2 * kMiB}) {
      const Budget budget{peak - over, "flag"};
      const uint64_t staging = shrunk_to_fit(plan, budget).options.staging_bytes;
      EXPECT_TRUE(fits(plan_with(staging).promise, budget)) << strategy.name << " " << over;
      const Plan more = plan_with(staging + (kRanks + 1) * kPageBytes);
      EXPECT_FALSE(fits(more.promise, budget)) << strategy.name << " " << over;
    }
  }
}

TEST(Budget, ThePromiseOfFullPerRankIsThatOfItsPlan) {
  const Manifest manifest = small_manifest();
  const Recipe recipe = identity_recipe(manifest);
  const auto plan_by = [&](const Strategy& strategy) {
    return make_plan(manifest, recipe, fsdp2_layout(kRanks), PlanOptions{.strategy = &strategy});
  };
  const Promise expected = plan_by(strategy_named("full-per-rank")).promise;
  for (const Strategy& strategy : strategies()) {
    const Promise promise = full_per_rank_promise(plan_by(strategy));
    EXPECT_EQ(promise.launcher_bytes, expected.launcher_bytes) << strategy.name;
    for (size_t phase = 0; phase < kLoadPhases; ++phase) {
      EXPECT_EQ(promise.phases[phase].of_rank, expected.phases[phase].of_rank) << strategy.name;
    }
  }
}

}  // namespace
}  // namespace modicum
