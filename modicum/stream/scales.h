// Stored elements into those of a target: casts, and FP8 codes times their scales.
#pragma once

#include "modicum/plan/plan.h"

namespace modicum {

// Stored scales in host memory: those from `first` on of a tensor of scales.
struct ScalesAtHand {
  const std::byte* bytes = nullptr;
  int64_t first = 0;
};

// Where `at_hand` begins with the extent that was read: a part of the scales of codes `stored`.
ScalesAtHand scales_read(const Plan& plan, uint32_t stored, const Extent& read,
                         const std::byte* at_hand);

// What one transfer does to each of its elements. Any thread.
class Conversion {
 public:
  // `scales` are needed where the transfer dequantises: those that scale_extent says, at least.
  Conversion(const Plan& plan, const Transfer& transfer, const ScalesAtHand& scales) noexcept;

  // `n` stored neighbours that stand at `from`, the first of them being element `first` of its
  // tensor; made to `to`, `to_step` elements apart.
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
