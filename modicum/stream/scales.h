// Converts stored elements to those of a target: casts, and FP8 codes times their scales.
#pragma once

#include "modicum/plan/plan.h"

namespace modicum {

// Stored scales in host memory: elements of a scale tensor from `first` on.
struct ScalesAtHand {
  const std::byte* bytes = nullptr;
  int64_t first = 0;
};

// The scales of the tensor of codes `stored`. Their extent `read` has been read to `at_hand`.
ScalesAtHand scales_read(const Plan& plan, uint32_t stored, const Extent& read,
                         const std::byte* at_hand);

// The conversion of one transfer's elements. Any thread.
class Conversion {
 public:
  // If the transfer dequantises, `scales` must cover scale_extent(plan, transfer).
  Conversion(const Plan& plan, const Transfer& transfer, const ScalesAtHand& scales) noexcept;

  // Converts `n` contiguous stored elements at `from`, the first being element `first` of its
  // tensor, and writes them to `to`, `to_step` elements apart.
  void run(const std::byte* from, int64_t first, std::byte* to, int64_t n,
           int64_t to_step = 1) const noexcept;

 private:
  void dequantise(const std::byte* from, int64_t first, std::byte* to, int64_t n,
                  int64_t to_step) const noexcept;

  const DType from_dtype_, to_dtype_;
  const bool dequantises_;
  const ScalesAtHand scales_;
  DType scale_dtype_ = DType::f32;
  ScaleGrid grid_;
};

}  // namespace modicum
