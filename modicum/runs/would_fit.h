// Finds runs that fit a budget. Part of the door of `runs`.
#pragma once

#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/report/report.h"

namespace modicum {

struct Run;

// For a `run` that does not fit `budget`: the runs that fit with the fewest changes to staging,
// strategy, state format and ranks per node. Sorted by the number of changes, then in the order
// just given; each flag is changed only as far as needed. Each run has been planned and fits. Empty
// if there is none.
std::vector<Alternative> would_fit(const Run& run, const Budget& budget);

}  // namespace modicum
