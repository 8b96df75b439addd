// Finds runs that fit a budget. Part of the public header of `runs`.
#pragma once

#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/report/report.h"

namespace modicum {

struct Run;

// For a `run` that does not fit `budget`: all runs that fit with the fewest changes among staging,
// strategy, state format and ranks per node. Staging and ranks per node change only as far as
// needed. The function has planned each of these runs. Empty if no run fits.
std::vector<Alternative> would_fit(const Run& run, const Budget& budget);

}  // namespace modicum
