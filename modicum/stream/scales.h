// Converts stored elements to a target's dtype: casts them, or multiplies FP8 codes by scales.
// Internal to `stream`.
#pragma once

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/plan/plan.h"

namespace modicum {

// Stored scales in host memory: `bytes` points to element `first` of a scale tensor.
struct ScalesAtHand {
  const std::byte* bytes = nullptr;
  int64_t first = 0;
};

// The scales of `stored`, a tensor of FP8 codes, that are in host memory: `at_hand` holds the bytes
// of `read`, an extent of its scale tensor. Empty if `read` is empty.
ScalesAtHand scales_read(const Plan& plan, uint32_t stored, const Extent& read,
                         const std::byte* at_hand);

// The conversion of one transfer's elements. Thread-safe.
class Conversion {
 public:
  // If the transfer dequantises, `scales` must cover scale_extent(plan, transfer).
  Conversion(const Plan& plan, const Transfer& transfer, const ScalesAtHand& scales) noexcept;

  // Converts `n` contiguous stored elements at `from`, of which the first is element `first` of its
  // tensor, and writes the i-th to `to` + i * `to_step` elements.
  void run(const std::byte* from, int64_t first, std::byte* to, int64_t n,
           int64_t to_step = 1) const noexcept;

  // What `run` has lost, called with the same arguments afterwards. `first_index` counts from
  // `from`.
  RangeLoss loss(const std::byte* from, int64_t first, const std::byte* to, int64_t n,
                 int64_t to_step = 1) const noexcept;

 private:
  void dequantise(const std::byte* from, int64_t first, std::byte* to, int64_t n,
                  int64_t to_step) const noexcept;
  // The same for elements that have one scale; 1 if they have none.
  RangeLoss loss_at_scale(float scale, const std::byte* from, const std::byte* to, int64_t n,
                          int64_t to_step) const noexcept;
  float scale_of(int64_t element) const noexcept;

  const DType from_dtype_, to_dtype_;
  const bool dequantises_;
  const ScalesAtHand scales_;
  DType scale_dtype_ = DType::f32;
  ScaleGrid grid_;
};

}  // namespace modicum
