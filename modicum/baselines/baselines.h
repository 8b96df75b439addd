// The door of `baselines`: what Modicum is compared with. The memory of DeepSpeed stands in
// deepspeed.h; here are the baselines of the optimizer's fused step.
//
// Three timings over the same memory, in rounds, all ranks at work at the same time: a plain copy,
// which is the machine's bandwidth; the step as five passes over fp32 state (unscale, norm, clip,
// Adam, cast to bf16); and the fused pass in the format under test over as many parameters.
#pragma once

#include <array>
#include <cstdint>

#include "modicum/base/base.h"
#include "modicum/baselines/deepspeed.h"  // IWYU pragma: export
#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"

namespace modicum {

// The step that is compared, on one rank.
struct BaselineTask {
  AdamWSpec spec;  // of one shard; as much of it is stepped as fits into its state's memory
  int threads = 1;
  uint64_t ring_bytes = 0;  // through which a low-precision copy leaves; 0: there is none
};

// Seconds of each round. Plain data.
struct Baselines {
  static constexpr int kRounds = 7;
  std::array<double, kRounds> copy_s{};
  std::array<double, kRounds> unfused_s{};
  std::array<double, kRounds> fused_s{};
  uint64_t copied_bytes = 0;  // read and written, of this rank
};

// What `measure_baselines` charges: never more than the state and its staging.
Footprint baseline_footprint(const BaselineTask& task);

// `line_up` waits for the other ranks before each timing. All memory is given back when this
// returns. BUDGET, NOMEM, and what `line_up` throws.
Baselines measure_baselines(const BaselineTask& task, Ledger& ledger, FunctionRef<void()> line_up,
                            Clock& clock);

}  // namespace modicum
