// Shared by the files of `plan`. Internal to `plan`.
#pragma once

#include <optional>

#include "modicum/plan/plan.h"

namespace modicum {

int ranks_per_node(const Plan& plan) noexcept;

// Whether a save by this plan has divided rows (see Rows) that several ranks of a node can write
// together. Only rank 0's shards are examined.
bool gathers(const Plan& plan);

// The reads of for_each_node_read for one target.
void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn);

// --- the scales that targets need ---

// Checks the scales of every dequantising target. Throws UNSUPPORTED if codes have no scale,
// MISMATCH if their block size is unknown (BlockScale::fits); both errors name the tensor of codes.
void prove_scales(const Plan& plan);
// The scale tensor with which `target` dequantises codes `stored`; empty if `target` holds the
// codes themselves.
std::optional<uint32_t> scale_for(const Plan& plan, uint32_t target, uint32_t stored) noexcept;
// Whether `target` takes elements of `stored`; else it uses the tensor only as scales.
bool takes_elements(const Plan& plan, uint32_t target, uint32_t stored) noexcept;

// is_needed: whether any target uses `stored`, for its elements or as scales. gives_elements:
// whether any target takes its elements.
bool is_needed(const Plan& plan, uint32_t stored) noexcept;
bool gives_elements(const Plan& plan, uint32_t stored) noexcept;
// The scale tensor of codes `stored`; empty unless some target dequantises them.
std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept;
// The part of the scale tensor that a transfer needs: whole rows of the grid, or part of one row.
// Empty if the transfer does not dequantise.
Extent scale_extent(const Plan& plan, const Transfer& transfer);

// --- the part of a transfer that fits into a tile of staging ---

// The largest direct read or write, and the largest read into a window: short enough to report
// progress often and to drop the page cache behind the reader.
constexpr uint64_t kMaxReadBytes = 8 * kMiB;

// The extent from the first to the last byte of a transfer's stored elements, gaps included.
Extent span_of(const Plan& plan, const Transfer& transfer);
// The bytes of a transfer in staging: span_of and the scales of its codes.
uint64_t staged_bytes(const Plan& plan, const Transfer& transfer);
// The largest multiple of eight elements that fits into `bytes`: it ends on a whole byte.
int64_t elements_within(DType dtype, uint64_t bytes) noexcept;
// The number of runs of a transfer, counted from its first, that fit into a tile with the gaps
// between them and the scales of their codes; at least one.
int64_t runs_that_fit(const Plan& plan, const Transfer& transfer);
// The number of elements of a transfer's first run that fit into `bytes` with the scales of their
// codes: all of them, or fewer that end on a whole byte.
int64_t elements_that_fit(const Plan& plan, const Transfer& transfer, uint64_t bytes);

}  // namespace modicum
