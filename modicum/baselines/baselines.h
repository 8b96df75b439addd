// The public header of `baselines`: what Modicum is compared with. deepspeed.h forecasts
// DeepSpeed's memory; this file times the optimizer step and two baselines, a copy of memory and an
// unfused step.
//
// All ranks measure the same work at the same time. Each kind of work is timed kRounds times:
//
//   copies    by libc's memcpy and by streaming stores; the faster one shows the memory bandwidth
//   unfused   the step as five passes over fp32 state: unscale, norm, clip, Adam, cast to bf16
//   fused     the step in the format under test, over the same number of parameters
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
  // Has one shard, whose size limits the timed steps: the fused and the unfused state together take
  // about as much memory as the state of this shard would. Each has the same number of parameters,
  // at least kBucketElements and at most 32 Mi.
  AdamWSpec spec;
  int threads = 1;
  uint64_t ring_bytes = 0;  // size of the ring into which the step writes bf16 parameters; 0: none
  uint64_t copy_bytes = 0;  // source plus target of the copy, over all threads of this rank
};

// The bytes that each thread copies if the budget allows it. At this size memcpy bypasses the
// caches.
constexpr uint64_t kCopyPieceBytes = 256 * kMiB;

// Seconds of each round. Trivially copyable.
struct Baselines {
  static constexpr int kRounds = 7;
  std::array<double, kRounds> memcpy_s{};
  std::array<double, kRounds> streaming_s{};
  std::array<double, kRounds> unfused_s{};
  std::array<double, kRounds> fused_s{};
  uint64_t copied_bytes = 0;  // read plus written by this rank in one round of a copy
};

// The bytes that `measure_baselines` charges for the copies, and releases before the steps.
Footprint copy_footprint(const BaselineTask& task);
// The bytes that `measure_baselines` charges for the fused and the unfused step together.
Footprint baseline_footprint(const BaselineTask& task);

// Calls `line_up`, a barrier, before each timing. Returns all memory to the ledger. Throws BUDGET,
// NOMEM, and any exception of `line_up`.
Baselines measure_baselines(const BaselineTask& task, Ledger& ledger, FunctionRef<void()> line_up,
                            Clock& clock);

}  // namespace modicum
