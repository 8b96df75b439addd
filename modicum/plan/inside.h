// Inside the room `plan`: what its files share and no other room needs.
#pragma once

#include <optional>

#include "modicum/plan/plan.h"

namespace modicum {

// The ranks [first, end) for which the first one reads under node-reader: those of one node, or all
// where only rank 0 can read.
struct NodeRanks {
  int first = 0;
  int end = 0;
};
int ranks_per_node(const Plan& plan) noexcept;
NodeRanks node_of(const Plan& plan, int rank) noexcept;

// Those of for_each_node_read that are for one target.
void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn);

// --- which targets need which scales ---

// Every target that dequantises has scales that fit: else UNSUPPORTED (none) or MISMATCH, naming
// the codes.
void prove_scales(const Plan& plan);
// The scale that `target` needs beside codes `stored`, which it takes; nothing where it takes them
// as they are.
std::optional<uint32_t> scale_for(const Plan& plan, uint32_t target, uint32_t stored) noexcept;
// Whether a target that needs `stored` does so for its elements, and not as a scale.
bool takes_elements(const Plan& plan, uint32_t target, uint32_t stored) noexcept;

// Whether any target needs `stored`; whether one does so for its elements. Scales of codes that are
// dequantised are needed, and it may be that no target has their elements.
bool is_needed(const Plan& plan, uint32_t stored) noexcept;
bool gives_elements(const Plan& plan, uint32_t stored) noexcept;
// The scale that must be at hand where elements of `stored` are put in place; nothing where no
// target dequantises them.
std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept;
// The part of the stored scales that a transfer needs: whole rows of their grid, or some of one
// row. Empty where nothing is dequantised.
Extent scale_extent(const Plan& plan, const Transfer& transfer);

// --- how much of a transfer fits into a tile of staging ---

// The most that one read brings straight into its place, or into a window: little enough to report
// progress often and to drop the page cache behind.
constexpr uint64_t kMostReadBytes = 8 * kMiB;

// First to last byte that a transfer's elements stand in.
Extent span_of(const Plan& plan, const Transfer& transfer);
// What it takes in staging: that span, and the scales of its codes.
uint64_t staged_bytes(const Plan& plan, const Transfer& transfer);
// The most elements that `bytes` hold and that end on a whole byte.
int64_t elements_within(DType dtype, uint64_t bytes) noexcept;
// So many of a transfer's runs, from its first on, fit into a tile together with the bytes between
// them and the scales of their codes; at least one.
int64_t runs_that_fit(const Plan& plan, const Transfer& transfer);
// So many elements of a transfer's first run fit into `bytes` with the scales of their codes: all,
// or some that end on a whole byte.
int64_t elements_that_fit(const Plan& plan, const Transfer& transfer, uint64_t bytes);

}  // namespace modicum
