#include "modicum/checkpoint/range_loss.h"

#include <algorithm>

namespace modicum {

void RangeLoss::add(const RangeLoss& other) noexcept {
  if (other.overflowed > 0 && (overflowed == 0 || other.first_index < first_index)) {
    first_index = other.first_index;
    first_value = other.first_value;
    first_stored = other.first_stored;
  }
  overflowed += other.overflowed;
  underflowed += other.underflowed;
  largest = std::max(largest, other.largest);
}

bool can_lose_range(DType from, DType to) noexcept {
  if (from == to) return false;
  if (is_fp8_code(from)) return is_castable(to);
  if (to == DType::f16) return from == DType::f32 || from == DType::bf16;
  return to == DType::bf16 && from == DType::f32;
}

double largest_finite(DType dtype) noexcept {
  if (dtype == DType::f16) return 65504;
  return dtype == DType::bf16 ? 0x1.fep127 : 0x1.fffffep127;
}

}  // namespace modicum
