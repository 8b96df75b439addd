// Conversions between the bits of fp32, bf16 and fp16, one element at a time and without branches,
// for casts and dequantisation. Internal to `kernels`.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "modicum/kernels/wide.h"

namespace modicum {

// Each format converts its bits to fp32's (exact) and back (rounded).
struct Fp32 {
  using Bits = uint32_t;
  static MODICUM_INLINE uint32_t widen(Bits bits) noexcept { return bits; }
  static MODICUM_INLINE Bits narrow(uint32_t f32) noexcept { return f32; }
};

struct Bf16 {
  using Bits = uint16_t;

  static MODICUM_INLINE uint32_t widen(Bits bits) noexcept {
    return static_cast<uint32_t>(bits) << 16;
  }

  // Adding 0x7fff, and one more where the kept part is odd, carries into the kept part exactly
  // when rounding to nearest even goes up. A carry out of the largest finite value gives infinity.
  static MODICUM_INLINE Bits narrow(uint32_t f32) noexcept {
    const uint32_t rounded = (f32 + 0x7fffU + ((f32 >> 16) & 1U)) >> 16;
    const bool is_nan = (f32 & 0x7fffffffU) > 0x7f800000U;
    return static_cast<Bits>(is_nan ? 0x7fc0U : rounded);
  }
};

// All ones where a < b, else 0; |a - b| < 2^31.
MODICUM_INLINE int32_t where_less(int32_t a, int32_t b) noexcept { return (a - b) >> 31; }
MODICUM_INLINE int32_t smaller(int32_t a, int32_t b) noexcept {
  return b + ((a - b) & where_less(a, b));
}
MODICUM_INLINE int32_t larger(int32_t a, int32_t b) noexcept {
  return a - ((a - b) & where_less(a, b));
}

// Conditions are masks: GCC compiles `?:` and std::min to branches around the float operation
// (which might trap) and then does not vectorise. Flush-to-zero modes have no effect: no result
// that is used is denormal, and a denormal operand of `narrow` is too small to change the sum.
struct Fp16 {
  using Bits = uint16_t;

  // The value is significand * 2^(exponent - 25), where denormals have the exponent 1 and no
  // implicit bit; both factors and their product are exact. Infinity and NaN, whose exponent is 31,
  // are first computed as numbers and then moved up to fp32's exponent 255.
  static MODICUM_INLINE uint32_t widen(Bits bits) noexcept {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
    const int32_t magnitude = bits & 0x7fff;
    const int32_t exponent = magnitude >> 10;
    const int32_t significand = (magnitude & 0x3ff) | (smaller(exponent, 1) << 10);
    const auto scale = std::bit_cast<float>((larger(exponent, 1) + 127 - 25) << 23);
    const auto product = std::bit_cast<uint32_t>(static_cast<float>(significand) * scale);
    const int32_t to_special = where_less(0x7bff, magnitude) & ((255 - 143) << 23);
    const int32_t quiet = where_less(0x7c00, magnitude) & 0x400000;
    return sign | (product + static_cast<uint32_t>(to_special)) | static_cast<uint32_t>(quiet);
  }

  // The anchor is the power of two whose last place in fp32 equals fp16's last place at this
  // exponent (the smallest normal's for denormals). Adding it rounds, and the sum's low bits count
  // fp16's places. A carry moves into the exponent. Larger values are capped at 2^16, which gives
  // infinity.
  static MODICUM_INLINE Bits narrow(uint32_t f32) noexcept {
    const uint32_t sign = (f32 >> 16) & 0x8000U;
    const auto magnitude = static_cast<int32_t>(f32 & 0x7fffffffU);
    const int32_t capped = smaller(magnitude, (127 + 16) << 23);
    const int32_t exponent = larger(capped >> 23, 127 - 14);
    const int32_t anchor = (exponent + 13) << 23;
    const float sum = std::bit_cast<float>(capped) + std::bit_cast<float>(anchor);
    const int32_t places = std::bit_cast<int32_t>(sum) - anchor;
    const int32_t number = ((exponent - (127 - 14)) << 10) + places;
    const int32_t nan = where_less(0x7f800000, magnitude) & (0x200 | ((magnitude >> 13) & 0x1ff));
    return static_cast<Bits>(sign | static_cast<uint32_t>(number | nan));
  }
};

template <typename Bits>
MODICUM_INLINE Bits load(const std::byte* from, int64_t i) noexcept {
  Bits bits;
  std::memcpy(&bits, from + i * static_cast<int64_t>(sizeof bits), sizeof bits);
  return bits;
}

template <typename Bits>
MODICUM_INLINE void store(std::byte* to, int64_t i, Bits bits) noexcept {
  std::memcpy(to + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
}

}  // namespace modicum
