// Finds runs that fit a budget. Part of the door of `runs`.
#pragma once

#include <vector>

#include "modicum/plan/plan.h"
#include "modicum/report/report.h"

namespace modicum {

struct Run;

// For a `run` that does not fit `budget`, the runs that do with as few changed flags as possible,
// of staging, strategy, state format and ranks per node. Smallest changes first: by number, then in
// the order just given, each changed only as far as needed. Every one is proven by its plan. Empty
// if none fits.
std::vector<Alternative> would_fit(const Run& run, const Budget& budget);

}  // namespace modicum
