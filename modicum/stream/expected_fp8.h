// The second reading of FP8 codes and scales: for checks, and sharing nothing with a load's.
#pragma once

#include <array>
#include <vector>

#include "modicum/stream/stream.h"

namespace modicum {

// Numbers of codes by their definition, one by one, with scales that are asked for. One thread.
class ExpectedFp8 {
 public:
  ExpectedFp8(const Plan& plan, ExpectedElements expected) : plan_(plan), expected_(expected) {}

  // Of the codes that are elements `first` and on of tensor `stored`, as fp32.
  std::span<const std::byte> numbers(uint32_t stored, int64_t first,
                                     std::span<const std::byte> codes);

 private:
  void fetch_row(uint32_t scales, int64_t row, int64_t columns);

  const Plan& plan_;
  const ExpectedElements expected_;
  uint32_t row_of_ = UINT32_MAX;  // whose scales `row_` are
  int64_t row_index_ = -1;
  std::vector<std::byte> stored_row_;
  std::vector<double> row_;
  std::vector<float> numbers_;
};

}  // namespace modicum
