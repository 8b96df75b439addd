// The order in which ranks write, and the staging for their divided rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr int kTensors = 8;

// Matrices of 64 x 64 in one file.
Manifest manifest_of_matrices() {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors", {}, 64});
  uint64_t end = 64;
  for (int i = 0; i < kTensors; ++i) {
    const uint64_t begin = std::exchange(end, end + 64 * 64 * 2);
    manifest.tensors.push_back(
        {{"w" + std::to_string(i), Role::param, DType::bf16, {64, 64}}, {0, begin, end}});
  }
  manifest.files[0].identity.size_bytes = end;
  return manifest;
}

// The stored tensors that `rank` writes, in order.
std::vector<uint32_t> walk_of(const Plan& plan, int rank, Rows rows) {
  std::vector<uint32_t> walk;
  std::vector<Transfer> table(kReadTableRows);
  for_each_write(plan, rank, rows, table, [&](const Write& write) {
    const uint32_t stored = write.transfers[0].from;
    if (walk.empty() || walk.back() != stored) walk.push_back(stored);
  });
  return walk;
}

// Catches: a gather part of staging where no gather takes place, or only one rank takes part.
TEST(Writes, StagingHasAGatherForDividedRowsOnANode) {
  const Manifest manifest = manifest_of_matrices();
  const Recipe recipe = make_recipe(manifest, {});
  const auto part_of = [&](int dim, int per_node, bool gathers) {
    const Plan plan = make_plan(
        manifest, recipe, fsdp2_layout(4, dim),
        {.strategy = &strategy_named("own-shard"), .ranks_per_node = per_node, .gathers = gathers});
    EXPECT_EQ(plan.staging.total_bytes, plan.options.staging_bytes);
    return plan.staging.gather_part_bytes;
  };
  EXPECT_EQ(part_of(1, 0, true), 2 * kMiB);
  EXPECT_EQ(part_of(1, 2, true), 2 * kMiB);
  EXPECT_EQ(part_of(1, 1, true), 0U);
  EXPECT_EQ(part_of(1, 0, false), 0U);
  EXPECT_EQ(part_of(0, 0, true), 0U);
}

// Two replicas write the tensors in turns. Catches: a replica that helps to write a tensor that
// comes from the first one; one that no replica writes.
TEST(Writes, TheFirstReplicaWritesATensorAlone) {
  const Manifest manifest = manifest_of_matrices();
  const Recipe recipe = make_recipe(manifest, {});
  std::vector<bool> from_first(kTensors);
  for (const bool is_from_first : {false, true}) {
    from_first[1] = is_from_first;
    const Plan plan =
        make_plan(manifest, recipe, hsdp_layout(2, {2}),
                  {.strategy = &strategy_named("own-shard"), .from_first = from_first});
    for (int rank = 0; rank < 4; ++rank) {
      const std::vector<uint32_t> walk = walk_of(plan, rank, Rows::whole);
      const bool is_first_replica = rank < 2;
      EXPECT_EQ(std::count(walk.begin(), walk.end(), 1U), is_first_replica == is_from_first);
      EXPECT_EQ(std::count(walk.begin(), walk.end(), 2U), is_first_replica);
    }
  }
}

// With whole rows, ranks begin at different tensors. With divided rows, ranks write to the same
// pages, so all walk the tensors in the same order. Catches: another order with divided rows; rows
// in neither walk or in both.
TEST(Writes, RanksThatSharePagesWalkInTheSameOrder) {
  const Manifest manifest = manifest_of_matrices();
  const Recipe recipe = make_recipe(manifest, {});
  std::vector<uint32_t> in_order;
  for (uint32_t i = 0; i < kTensors; ++i) in_order.push_back(i);
  for (const bool divided : {false, true}) {
    const Plan plan = make_plan(manifest, recipe, fsdp2_layout(4, divided ? 1 : 0),
                                {.strategy = &strategy_named("own-shard")});
    std::set<uint32_t> begins;
    for (int rank = 0; rank < 4; ++rank) {
      std::vector<uint32_t> walk = walk_of(plan, rank, divided ? Rows::divided : Rows::whole);
      EXPECT_TRUE(walk_of(plan, rank, divided ? Rows::whole : Rows::divided).empty());
      ASSERT_EQ(walk.size(), in_order.size());
      begins.insert(walk[0]);
      if (divided) {
        EXPECT_EQ(walk, in_order);
      }
      std::sort(walk.begin(), walk.end());
      EXPECT_EQ(walk, in_order);
    }
    EXPECT_EQ(begins.size(), divided ? 1U : 4U);
  }
}

}  // namespace
}  // namespace modicum
