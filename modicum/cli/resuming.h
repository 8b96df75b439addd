// Resuming from a step, for `resume` and `rehearse`. Internal to `cli`.
#pragma once

#include <optional>

#include "modicum/cli/within_budget.h"

namespace modicum {

struct ResumeSteps {
  int steps = 0;
  std::optional<double> max_norm;
};
// Loads a step and its optimizer's state, then makes optimizer steps. The directory in `flags` is
// replaced by the step's; an empty `flags.optimizer` means the saved one. MISMATCH or UNSUPPORTED
// if the state does not fit the flags; BUDGET.
LoadReport resume_step(const CommonFlags& common, RunFlags flags, const FoundStep& step,
                       const ResumeSteps& then);

}  // namespace modicum
