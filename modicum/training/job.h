// Promises the memory of a training job in advance: load, steps, a save and a resume. Part of the
// public header of `training`.
#pragma once

#include <string>

#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// The run of `flags` that resumes from the saved checkpoint that run `saving`
// writes with `plan` and `state`. The checkpoint need not exist yet. Throws the errors of run_of
// and StateFiles::require_of.
Run resuming_run(const RunFlags& flags, const Run& saving, const SavePlan& plan,
                 const StateFiles& state);

// The report of the command `plan`: plan_report and, with an optimizer, the promises of the job
// under each strategy. A warning says why if the save and the resume are not promised.
PlanReport job_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan);

}  // namespace modicum
