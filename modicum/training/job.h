// The promises of a job before any of it has run: load, steps, a save and a resume. Part of the
// door of `training`.
#pragma once

#include <string>

#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// The run of `flags` that resumes what `plan` and `state` save of `saving`. The step need not exist
// yet. Errors as those of run_of and StateFiles::require_of.
Run resuming_run(const RunFlags& flags, const Run& saving, const SavePlan& plan,
                 const StateFiles& state);

// The report of verb `plan`: plan_report, and with an optimizer each strategy's job, if it can be
// saved and resumed in this layout. Otherwise a warning gives the reason.
PlanReport job_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan);

}  // namespace modicum
