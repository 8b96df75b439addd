// Shared by the files of `plan`. Internal to `plan`.
#pragma once

#include <optional>

#include "modicum/plan/plan.h"

namespace modicum {

// Ranks [first, end), for which the first one reads under node-reader: one node, or all ranks if
// only rank 0 can read the files.
struct NodeRanks {
  int first = 0;
  int end = 0;
};
int ranks_per_node(const Plan& plan) noexcept;
NodeRanks node_of(const Plan& plan, int rank) noexcept;

// The reads of for_each_node_read for one target.
void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn);

// --- which targets need which scales ---

// Throws unless every dequantising target has scales whose grid fits: UNSUPPORTED if the codes have
// none, MISMATCH if the grid fits no block size, naming the codes.
void prove_scales(const Plan& plan);
// The scale tensor with which `target` dequantises codes `stored`; none if it takes the codes as
// stored.
std::optional<uint32_t> scale_for(const Plan& plan, uint32_t target, uint32_t stored) noexcept;
// Whether `target`, which uses `stored`, takes its elements rather than using it as scales.
bool takes_elements(const Plan& plan, uint32_t target, uint32_t stored) noexcept;

// Whether any target uses `stored`; whether any target takes its elements. Scales may be used
// without any target taking their elements.
bool is_needed(const Plan& plan, uint32_t stored) noexcept;
bool gives_elements(const Plan& plan, uint32_t stored) noexcept;
// The scale tensor of codes `stored`; none if no target dequantises them.
std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept;
// The part of the stored scales that a transfer needs: whole rows of their grid, or part of one
// row. Empty if nothing is dequantised.
Extent scale_extent(const Plan& plan, const Transfer& transfer);

// --- how much of a transfer fits into a tile of staging ---

// The largest read straight into a local buffer or a window: short enough to report progress often
// and to drop the page cache behind the reader.
constexpr uint64_t kMostReadBytes = 8 * kMiB;

// From the first to the last byte of a transfer's stored elements, gaps included.
Extent span_of(const Plan& plan, const Transfer& transfer);
// What a transfer takes in staging: that span and the scales of its codes.
uint64_t staged_bytes(const Plan& plan, const Transfer& transfer);
// The largest number of elements in `bytes` that end on a whole byte.
int64_t elements_within(DType dtype, uint64_t bytes) noexcept;
// How many runs of a transfer, from its first on, fit into a tile with the gaps between them and
// the scales of their codes; at least one.
int64_t runs_that_fit(const Plan& plan, const Transfer& transfer);
// How many elements of a transfer's first run fit into `bytes` with the scales of their codes: all
// of them, or some that end on a whole byte.
int64_t elements_that_fit(const Plan& plan, const Transfer& transfer, uint64_t bytes);

}  // namespace modicum
