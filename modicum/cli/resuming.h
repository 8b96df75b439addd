// Resuming from a saved checkpoint, for `resume` and `rehearse`. Internal to
// `cli`.
#pragma once

#include <optional>

#include "modicum/cli/within_budget.h"

namespace modicum {

// Optimizer steps after the load.
struct ResumeSteps {
  int steps = 0;
  std::optional<double> max_norm;  // for gradient clipping; nullopt: no clipping
};
// Opens the state of a checkpoint, which has one, and completes the flags of a run that goes on
// from it: an empty `flags.optimizer` means the saved format. Throws the errors of ResumeState.
void take_state(const Surroundings& at, const RunCheckpoint& step, RunFlags& flags,
                std::optional<ResumeState>& state);
// Loads a checkpoint and its optimizer's state, then makes optimizer steps. Uses the checkpoint's
// directory instead of `flags.directory`; an empty `flags.optimizer` means the saved one. Throws
// MISMATCH or UNSUPPORTED if the state does not fit the flags, USAGE for checkpoints with
// --optimizer none, and BUDGET if the plan does not fit the budget.
LoadReport resume_checkpoint(const Surroundings& at, const CommonFlags& common, RunFlags flags,
                             RunCheckpoint step, const ResumeSteps& then);

}  // namespace modicum
