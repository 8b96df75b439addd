#include <gtest/gtest.h>

#include "modicum/plan/plan.h"
#include "modicum/plan/traffic_double.h"

namespace modicum {
namespace {

// Must fail if replicas that read alone are counted as if they shared their reads, or if ranks that
// hold equal elements of only some targets are counted as replicas.
TEST(TrafficOfReplicas, IsTheSumOverTheRanks) {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors"});
  uint64_t end = 0;
  for (const int64_t rows : {1000, 3, 300}) {
    const TensorSpec spec{std::to_string(rows), Role::param, DType::bf16, {rows, 100}};
    const uint64_t begin = end;
    end += bytes_of(spec.dtype, numel_of(spec.shape));
    manifest.tensors.push_back({spec, {0, begin, end}});
  }
  const Recipe recipe = identity_recipe(manifest);
  Layout mixed = hsdp_layout(2, {3});
  mixed.kind_of = {0, add_kind(mixed, {.mesh = {{3, 2}}, .cuts = {{.axes = {0}}}}), 0};
  for (const Strategy& strategy : strategies()) {
    for (const Layout& layout : {hsdp_layout(2, {3}), hsdp_layout(3, {2}, 1), whole_layout(6),
                                 tp_fsdp_layout({3}, 2), mixed}) {
      const Plan plan = make_plan(manifest, recipe, layout, {.strategy = &strategy});
      Traffic sum;
      for (int rank = 0; rank < plan.ranks(); ++rank) sum += traffic_of_rank(plan, rank);
      EXPECT_EQ(traffic(plan), sum) << strategy.name << ", " << layout.name;
    }
  }
}

}  // namespace
}  // namespace modicum
