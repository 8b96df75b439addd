// Finds runs that fit a budget. Part of the public header of `runs`.
#pragma once

#include <vector>

#include "modicum/base/base.h"
#include "modicum/baselines/baselines.h"
#include "modicum/plan/plan.h"
#include "modicum/report/report.h"

namespace modicum {

struct Run;
struct RunFlags;

// Whether a save and a resume of `run` fit, too, with the strategy, the staging and the ranks per
// node of `options`. `flags` have the dtype and the optimizer of the changed run.
using FitsJob =
    FunctionRef<bool(const RunFlags& flags, const Run& run, const PlanOptions& options)>;

// For a `run` of `flags` that does not fit `budget`: runs that fit with other staging, strategy,
// dtype, state format or ranks per node. First the cheapest ones on the same nodes: those that lose
// no precision or, if none fits, those that lose least; then those with fewer ranks per node, again
// by what they lose, and of equal loss those on the fewest nodes. Otherwise, of equal loss, only
// those with the fewest changes. Staging and ranks per node change only as far as needed. The
// function has planned each of these runs. Empty if no run fits.
std::vector<Alternative> would_fit(const RunFlags& flags, const Run& run, const Budget& budget,
                                   FitsJob fits_job);

// For a training by DeepSpeed, `task`, that does not fit `budget`: changes of its configuration,
// protection of its buffers, other workers and fewer ranks per node after which its forecast fits,
// the fewest first; and, if `run` has no optimizer, the same run with Modicum's AdamW. Empty if
// none fits.
std::vector<Alternative> would_fit(const RunFlags& flags, const Run& run, const DeepSpeedTask& task,
                                   const Budget& budget, FitsJob fits_job);

}  // namespace modicum
