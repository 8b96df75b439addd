// What a cast loses because the range of its dtype is too small. Part of the public header of
// `checkpoint`.
#pragma once

#include <cstdint>

#include "modicum/spec/spec.h"

namespace modicum {

// Counts over elements of one tensor, and facts about those that overflowed.
struct RangeLoss {
  int64_t overflowed = 0;   // finite values that became infinite
  int64_t underflowed = 0;  // values other than zero that became zero
  // These are set if `overflowed` is not 0. Values are those before the cast.
  int64_t first_index = 0;  // the lowest row-major index of an overflowed element
  double first_value = 0;
  uint32_t first_stored = UINT32_MAX;  // the stored tensor of that element, if there is one
  double largest = 0;                  // the largest magnitude

  bool empty() const noexcept { return overflowed == 0 && underflowed == 0; }
  // Adds the loss of other elements of the tensor.
  void add(const RangeLoss& other) noexcept;
  bool operator==(const RangeLoss&) const = default;
};

// Whether a conversion from `from` (fp32, bf16, fp16, or FP8 codes with scales) to `to` (fp32, bf16
// or fp16) can make a finite value infinite, or make a value zero.
bool can_lose_range(DType from, DType to) noexcept;
// The largest finite value of fp32, bf16 or fp16.
double largest_finite(DType dtype) noexcept;

}  // namespace modicum
