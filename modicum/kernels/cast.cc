// Casts between fp32, bf16 and fp16, one element per iteration and without branches, so that the
// compiler turns every contiguous loop into vector code. Elements are moved with memcpy: pointers
// need no alignment and no type is punned.
//
// fp32 -> bf16 is integer arithmetic, because hardware instructions for it flush denormals. fp16
// takes one exact or correctly rounded float operation instead, as SSE2 has no shift by a count of
// each element's own; nothing depends on the flush-to-zero modes that frameworks may set.
#include <bit>
#include <cassert>
#include <cstring>

#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

// Each format says how its bits become those of an fp32 (exact) and back (rounded).
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
  // when nearest-even goes up. A carry out of the largest finite value gives infinity.
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

// Conditions are written as masks: of `?:` and std::min GCC makes branches around the float
// operation (which might trap), and then vectorises nothing. No denormal is an operand or a result
// that matters.
struct Fp16 {
  using Bits = uint16_t;

  // The value is significand * 2^(exponent - 25), where denormals have the exponent 1 and no
  // implicit bit; as numbers, both factors and their product are exact. Infinity and NaN come out
  // as if 31 were an exponent like others and are then moved up to fp32's 255.
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

  // The anchor is the power of two whose last place is fp16's last place for numbers of this
  // exponent (the smallest normal's for denormals): adding it rounds, and the sum's low bits count
  // these places. A carry moves into the exponent. What is too large is capped at 2^16, which comes
  // out as infinity.
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

template <typename From, typename To>
struct Contiguous {
  const std::byte* from;
  std::byte* to;
  int64_t n;

  MODICUM_INLINE void operator()() const noexcept {
    const std::byte* __restrict source = from;
    std::byte* __restrict target = to;
    const int64_t count = n;
    for (int64_t i = 0; i < count; ++i) {
      store(target, i, To::narrow(From::widen(load<typename From::Bits>(source, i))));
    }
  }
};

template <typename From, typename To>
void convert(const std::byte* from, std::byte* to, int64_t n, int64_t to_step) noexcept {
  if (to_step == 1) return run_widest(Contiguous<From, To>{from, to, n});
  for (int64_t i = 0; i < n; ++i) {
    store(to, i * to_step, To::narrow(From::widen(load<typename From::Bits>(from, i))));
  }
}

template <typename From>
void convert_from(const std::byte* from, std::byte* to, DType to_dtype, int64_t n,
                  int64_t to_step) noexcept {
  switch (to_dtype) {
    case DType::f32: return convert<From, Fp32>(from, to, n, to_step);
    case DType::bf16: return convert<From, Bf16>(from, to, n, to_step);
    case DType::f16: return convert<From, Fp16>(from, to, n, to_step);
    default: assert(!"cast to a dtype that is never cast");
  }
}

template <typename Bits>
void spread(const std::byte* __restrict from, std::byte* __restrict to, int64_t n,
            int64_t to_step) noexcept {
  for (int64_t i = 0; i < n; ++i) store(to, i * to_step, load<Bits>(from, i));
}

void copy_strided(const std::byte* from, std::byte* to, DType dtype, int64_t n,
                  int64_t to_step) noexcept {
  switch (bits_per_element(dtype)) {
    case 8: return spread<uint8_t>(from, to, n, to_step);
    case 16: return spread<uint16_t>(from, to, n, to_step);
    case 32: return spread<uint32_t>(from, to, n, to_step);
    case 64: return spread<uint64_t>(from, to, n, to_step);
    default: assert(!"a stride over elements below a byte");
  }
}

}  // namespace

void cast(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
          int64_t n) noexcept {
  if (from_dtype == to_dtype) {
    if (n > 0) std::memcpy(to, from, bytes_of(from_dtype, n));
    return;
  }
  cast_strided(from, from_dtype, to, to_dtype, n, 1);
}

void cast_strided(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t n,
                  int64_t to_step) noexcept {
  if (from_dtype == to_dtype) return copy_strided(from, to, from_dtype, n, to_step);
  switch (from_dtype) {
    case DType::f32: return convert_from<Fp32>(from, to, to_dtype, n, to_step);
    case DType::bf16: return convert_from<Bf16>(from, to, to_dtype, n, to_step);
    case DType::f16: return convert_from<Fp16>(from, to, to_dtype, n, to_step);
    default: assert(!"cast from a dtype that is never cast");
  }
}

}  // namespace modicum
