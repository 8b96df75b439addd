// FP8 dequantisation for checks. Shares no dequantisation code with a load.
#pragma once

#include <array>
#include <vector>

#include "modicum/stream/stream.h"

namespace modicum {

// Computes the values of FP8 codes one by one, from the definition of the format. Gets the scales
// from `expected`, one row at a time. Not thread-safe.
class ExpectedFp8 {
 public:
  ExpectedFp8(const Plan& plan, ExpectedElements expected) : plan_(plan), expected_(expected) {}

  // The fp32 values of `codes`, elements [first, first + codes.size()) of tensor `stored`. Valid
  // until the next call.
  std::span<const std::byte> numbers(uint32_t stored, int64_t first,
                                     std::span<const std::byte> codes);

 private:
  // Makes `row_` row `row` of the scale tensor `scales`, which has `columns` columns.
  void fetch_row(uint32_t scales, int64_t row, int64_t columns);

  const Plan& plan_;
  const ExpectedElements expected_;
  uint32_t row_of_ = UINT32_MAX;       // the scale tensor that holds `row_`
  int64_t row_index_ = -1;             // the index of `row_` in this tensor
  std::vector<std::byte> stored_row_;  // `row_` in the dtype of the scales
  std::vector<double> row_;            // the row of scales that was fetched last
  std::vector<float> numbers_;
};

}  // namespace modicum
