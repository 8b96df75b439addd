#include "modicum/plan/inside.h"

#include <algorithm>

namespace modicum {
namespace {

// The number of steps that fit into `bytes` with the scales of their codes; at most `most`, at
// least one. A step of `step_bytes` is a run, or an element of a run. `first(n)` returns the
// transfer of the first n steps.
template <typename First>
int64_t fitting(const Plan& plan, int64_t most, uint64_t step_bytes, uint64_t bytes,
                const First& first) {
  int64_t n = most;
  while (n > 1) {
    const uint64_t needed = staged_bytes(plan, first(n));
    if (needed <= bytes) break;
    const uint64_t over = (needed - bytes + step_bytes - 1) / step_bytes;
    // Fewer steps never need more scales, so dropping `over` steps is enough.
    n = over < static_cast<uint64_t>(n) ? n - static_cast<int64_t>(over) : n / 2;
  }
  return n;
}

}  // namespace

Extent span_of(const Plan& plan, const Transfer& transfer) {
  return extent_of(plan.manifest->tensors[transfer.from], transfer.runs.first,
                   transfer.runs.span());
}

uint64_t staged_bytes(const Plan& plan, const Transfer& transfer) {
  return span_of(plan, transfer).bytes() + scale_extent(plan, transfer).bytes();
}

int64_t elements_within(DType dtype, uint64_t bytes) noexcept {
  const auto bits = static_cast<uint64_t>(bits_per_element(dtype));
  return static_cast<int64_t>(bytes * 8 / bits / 8 * 8);  // eight elements are whole bytes
}

int64_t runs_that_fit(const Plan& plan, const Transfer& transfer) {
  const Runs& runs = transfer.runs;
  const uint64_t run_bytes = bytes_of(transfer.from_dtype, runs.length);
  const uint64_t stride_bytes = bytes_of(transfer.from_dtype, runs.stride);
  const uint64_t tile_bytes = plan.staging.tile_bytes;
  const auto most = static_cast<int64_t>((tile_bytes - run_bytes) / stride_bytes) + 1;
  return fitting(plan, std::min(most, runs.count), stride_bytes, tile_bytes,
                 [&](int64_t n) { return transfer.part(0, n, 0, runs.length); });
}

int64_t elements_that_fit(const Plan& plan, const Transfer& transfer, uint64_t bytes) {
  const int64_t most = std::min(elements_within(transfer.from_dtype, bytes), transfer.runs.length);
  if (!transfer.dequantises()) return most;
  // A step is one code, which is one byte.
  return fitting(plan, most, 1, bytes, [&](int64_t n) { return transfer.part(0, 1, 0, n); });
}

}  // namespace modicum
