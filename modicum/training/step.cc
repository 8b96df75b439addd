#include "modicum/training/step.h"

#include <algorithm>
#include <utility>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr uint64_t kRankBytes = 2 * kMiB;     // a rank process before the state
constexpr uint64_t kThreadBytes = 32 * kKiB;  // a thread's stack
constexpr uint64_t kChildBytes = 256 * kKiB;  // a child that does nothing: what it doesn't share

}  // namespace

AdamWSpec StepRun::spec(int rank) const {
  const int64_t buckets = ceil_div(params, kBucketElements);
  const auto cut = [&](int64_t r) {
    return std::min(params, buckets * r / ranks * kBucketElements);
  };
  ShardSpec shard{.fqn = "weight", .runs = {{cut(rank), cut(rank + 1) - cut(rank)}}};
  if (shard.runs[0].n == 0) shard.runs.clear();
  return {.format = format, .shards = {std::move(shard)}, .seed = seed};
}

uint64_t ring_bytes(const StepRun& run) noexcept {
  if (run.row().is_split()) return 0;
  return static_cast<uint64_t>(run.threads) * kSlotsPerThread * kRingSlotBytes;
}

Promise promise_of(const StepRun& run) {
  Promise promise;
  promise.launcher_bytes = kLauncherBytes;
  promise.phases = {{"compare", {}}, {"step", {}}};
  for (int rank = 0; rank < run.ranks; ++rank) {
    promise.node_of_rank.push_back(0);
    Footprint always;
    always[Purpose::process] = kRankBytes + static_cast<uint64_t>(run.threads) * kThreadBytes +
                               static_cast<uint64_t>(run.children) * 2 * kChildBytes;
    always[Purpose::staging] = round_up(gradient_staging_bytes(run.threads), kPageBytes) +
                               round_up(ring_bytes(run), kPageBytes);
    Footprint compare = run.compares ? baseline_footprint(run, rank) : Footprint{};
    Footprint step = adamw_footprint(run.spec(rank));
    for (Footprint* phase : {&compare, &step}) {
      *phase += always;
      (*phase)[Purpose::page_tables] = page_table_bytes(phase->ledger_total());
    }
    promise.phases[0].of_rank.push_back(compare);
    promise.phases[1].of_rank.push_back(step);
  }
  return promise;
}

}  // namespace modicum
