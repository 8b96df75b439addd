// Resuming from a step, for `resume` and `rehearse`. Internal to `cli`.
#pragma once

#include <optional>

#include "modicum/cli/within_budget.h"

namespace modicum {

struct ResumeSteps {
  int steps = 0;
  std::optional<double> max_norm;
};
// Loads a step and its optimizer's state by the flags, of which the directory is the step's, and
// makes steps. An empty `optimizer` is the saved one. MISMATCH, UNSUPPORTED if the state does not
// fit the flags; BUDGET.
LoadReport resume_step(const CommonFlags& common, RunFlags flags, const FoundStep& step,
                       const ResumeSteps& then);
// What reading a state of these files adds to the plan of a run (PlanOptions::resume).
Footprint resume_footprint(const StateFiles& state);

}  // namespace modicum
