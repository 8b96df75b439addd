// What fits where a run does not. Part of the door of `runs`.
#pragma once

#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/report/report.h"

namespace modicum {

struct Run;

// Runs that fit `budget`, where `run` does not: its strategy, staging, optimizer state format or
// ranks per node changed, no more of them at a time than is needed. The smallest changes first, as
// in this order: staging, strategy, format, ranks per node; of each the smallest that is enough.
// Each is proven by the plan that `load` would follow. Empty where nothing fits.
std::vector<Alternative> would_fit(const Run& run, const Budget& budget);

}  // namespace modicum
