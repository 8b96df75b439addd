// Counts zeros and infinities. Elements are compared as integers, so that the flush-to-zero mode
// has no effect, and without branches, so that the compiler vectorises the loop.
#include <algorithm>
#include <bit>
#include <cassert>

#include "modicum/kernels/floats.h"
#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

// Bits without the sign, and those of infinity. E4M3 has no infinity: no magnitude is 0xff.
template <typename Of, Of kAllButSign, Of kInfinite>
struct Format {
  using Bits = Of;
  static constexpr Bits magnitude = kAllButSign, infinity = kInfinite;
};
using OfFp32 = Format<uint32_t, 0x7fffffff, 0x7f800000>;
using OfBf16 = Format<uint16_t, 0x7fff, 0x7f80>;
using OfFp16 = Format<uint16_t, 0x7fff, 0x7c00>;
using OfE4m3 = Format<uint8_t, 0x7f, 0xff>;
using OfE5m2 = Format<uint8_t, 0x7f, 0x7c>;

// The elements of a block are counted in integers as narrow as the elements, which therefore must
// not overflow.
constexpr int64_t kBlock = 255;

template <typename Of>
struct SpecialsCounter {
  const std::byte* from;
  int64_t n;
  Specials* counts;

  MODICUM_INLINE void operator()() const noexcept {
    using Bits = typename Of::Bits;
    const std::byte* source = from;
    int64_t zeros = 0, infinities = 0;
    for (int64_t left = n; left > 0; left -= kBlock) {
      const int64_t count = std::min(left, kBlock);
      Bits zero = 0, infinite = 0;
      for (int64_t i = 0; i < count; ++i) {
        const auto bits = static_cast<Bits>(load<Bits>(source, i) & Of::magnitude);
        zero = static_cast<Bits>(zero + (bits == 0 ? 1 : 0));
        infinite = static_cast<Bits>(infinite + (bits == Of::infinity ? 1 : 0));
      }
      zeros += zero;
      infinities += infinite;
      source += count * static_cast<int64_t>(sizeof(Bits));
    }
    *counts = {zeros, infinities};
  }
};

template <typename Of>
Specials count(const std::byte* from, int64_t n, int64_t step) noexcept {
  Specials counts;
  if (step == 1) {
    run_widest(SpecialsCounter<Of>{from, n, &counts});
    return counts;
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = load<typename Of::Bits>(from, i * step) & Of::magnitude;
    counts.zeros += bits == 0 ? 1 : 0;
    counts.infinities += bits == Of::infinity ? 1 : 0;
  }
  return counts;
}

}  // namespace

Specials count_specials(const std::byte* from, DType dtype, int64_t n, int64_t step) noexcept {
  switch (dtype) {
    case DType::f32: return count<OfFp32>(from, n, step);
    case DType::bf16: return count<OfBf16>(from, n, step);
    case DType::f16: return count<OfFp16>(from, n, step);
    case DType::f8_e4m3: return count<OfE4m3>(from, n, step);
    case DType::f8_e5m2: return count<OfE5m2>(from, n, step);
    default: assert(!"zeros and infinities of a dtype that is never cast");
  }
  return {};
}

double value_at(const std::byte* from, DType dtype, int64_t i) noexcept {
  switch (dtype) {
    case DType::f32: return load<float>(from, i);
    case DType::bf16: return std::bit_cast<float>(Bf16::widen(load<uint16_t>(from, i)));
    case DType::f16: return std::bit_cast<float>(Fp16::widen(load<uint16_t>(from, i)));
    default: break;
  }
  constexpr float kOne = 1;
  float value = 0;
  dequant({from + i, dtype, &kOne}, reinterpret_cast<std::byte*>(&value), DType::f32, 1);
  return value;
}

}  // namespace modicum
