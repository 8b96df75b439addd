// Inside the room `plan`: how much of a transfer fits into a tile of staging.
#pragma once

#include "modicum/plan/plan.h"

namespace modicum {

// The most that one read brings straight into its place, or into a window: little enough to report
// progress often and to drop the page cache behind.
constexpr uint64_t kMostReadBytes = 8 * kMiB;

// First to last byte that a transfer's elements stand in.
Extent span_of(const Plan& plan, const Transfer& transfer);
// So many of a transfer's runs, from its first on, fit into a tile together with the bytes between
// them and the scales of their codes; at least one.
int64_t runs_that_fit(const Plan& plan, const Transfer& transfer);
// So many elements of a transfer's first run fit into `bytes` with the scales of their codes: all,
// or some that end on a whole byte.
int64_t elements_that_fit(const Plan& plan, const Transfer& transfer, uint64_t bytes);

}  // namespace modicum
