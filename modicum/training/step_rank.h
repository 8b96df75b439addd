// A rank's life in `step`. Internal to `training`.
#pragma once

#include <array>
#include <cstdint>

#include "modicum/baselines/baselines.h"
#include "modicum/training/lock_step.h"
#include "modicum/training/step.h"

namespace modicum {

// What the ranks share, made before they are forked.
struct StepWorld {
  const StepTask& task;
  const Promise& promise;
  Clock& clock;
  SharedBoard& board;
  const NormPage& page;
};

// What a rank found. Plain data: it crosses from the rank's process.
struct StepOutcome {
  uint64_t fixed_bytes = 0;  // of this rank and its children, rank 0 with the launcher
  std::array<uint64_t, 2> kernel_bytes{};  // the same at step 1 and since, at their highest
  std::array<uint64_t, 2> ledger_bytes{};  // of the state
  Baselines baselines;
  StepsTaken taken;
  StateDigest digest;  // this rank's part
};

// A rank's part of the parameter.
AdamWSpec spec_of(const StepTask& task, int rank);
// The ring through which a whole master's low-precision copy leaves; 0 where the master is split.
uint64_t ring_bytes(const StepTask& task) noexcept;
double bytes_per_param_moved(const StepTask& task) noexcept;

void be_step_rank(const StepWorld& world, int rank);

}  // namespace modicum
