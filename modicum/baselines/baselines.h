// The door of `baselines`: comparisons. deepspeed.h forecasts DeepSpeed's memory; this file times
// the optimizer step against two baselines.
//
// Each round times, on all ranks concurrently: a parallel copy, once by libc's memcpy and once by
// streaming stores, of which the faster is the machine's bandwidth; the step as five passes over
// fp32 state (unscale, norm, clip, Adam, cast to bf16); and the fused step, in the format under
// test, over the same number of parameters.
#pragma once

#include <array>
#include <cstdint>

#include "modicum/base/base.h"
#include "modicum/baselines/deepspeed.h"  // IWYU pragma: export
#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"

namespace modicum {

// The step under test, on one rank.
struct BaselineTask {
  AdamWSpec spec;  // has one shard; as many of its elements are stepped as fit into its state
  int threads = 1;
  uint64_t ring_bytes = 0;  // of the ring for a low-precision copy; 0: no copy
  uint64_t copy_bytes = 0;  // source and target of the parallel copy, all threads together
};

// The bytes that each thread copies if the budget allows it: enough for memcpy to bypass the
// caches.
constexpr uint64_t kCopyPieceBytes = 256 * kMiB;

// Seconds per round. Plain data.
struct Baselines {
  static constexpr int kRounds = 7;
  std::array<double, kRounds> memcpy_s{};
  std::array<double, kRounds> streaming_s{};
  std::array<double, kRounds> unfused_s{};
  std::array<double, kRounds> fused_s{};
  uint64_t copied_bytes = 0;  // read plus written by this rank's memcpy
};

// The bytes that `measure_baselines` charges for the parallel copy. It returns them before it
// charges the steps, which take at most the state and its staging.
Footprint copy_footprint(const BaselineTask& task);
Footprint baseline_footprint(const BaselineTask& task);

// Calls `line_up`, a barrier, before each timing. Returns all memory. BUDGET, NOMEM, and any
// exception of `line_up`.
Baselines measure_baselines(const BaselineTask& task, Ledger& ledger, FunctionRef<void()> line_up,
                            Clock& clock);

}  // namespace modicum
