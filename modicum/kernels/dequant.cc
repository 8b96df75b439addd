// FP8 codes times their scales. Codes are widened by arithmetic instead of a table, so that the
// compiler vectorises whole blocks.
//
// A normal product of two normal numbers does not depend on the flush-to-zero mode. As fp32, codes
// are normal or zero, and scales are nearly always far from the ends of fp32's range: then a single
// multiplication per code suffices. Other scales use integer arithmetic, code by code.
#include <algorithm>
#include <bit>
#include <cassert>

#include "modicum/kernels/floats.h"
#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

constexpr uint32_t kSign = 0x80000000U;
constexpr uint32_t kInfinity = 0x7f800000U;
constexpr uint32_t kNan = 0x7fc00000U;
constexpr int kPlaces = 23;    // bits of fp32's mantissa
constexpr int kLowest = -149;  // exponent of the smallest denormal of fp32

// Finite codes are 0 or have magnitudes from 2^-16 to 2^16: with a scale between these bounds all
// products are 0 or normal.
constexpr uint32_t kPlainFrom = (127U - 100) << kPlaces;
constexpr uint32_t kPlainTo = (127U + 100) << kPlaces;

// A code's lower seven bits are its magnitude. A magnitude above `infinity` is NaN, else one above
// `largest` is infinity (E4M3 has none).
struct E4m3 {
  static constexpr int32_t mantissa_bits = 3, bias = 7, largest = 0x7e, infinity = 0x7e;
};
struct E5m2 {
  static constexpr int32_t mantissa_bits = 2, bias = 15, largest = 0x7b, infinity = 0x7c;
};

// Shifts the magnitude's bits to fp32's fields and corrects the exponent's bias. A denormal code
// gets the exponent of the smallest normal, whose implicit bit is then subtracted, so that no
// operand is denormal.
template <typename Code>
MODICUM_INLINE float value_of(int32_t magnitude) noexcept {
  constexpr int32_t kExponent = (127 - Code::bias) << kPlaces;
  constexpr int32_t kSmallest = kExponent + (1 << kPlaces);
  const int32_t denormal = where_less(magnitude, 1 << Code::mantissa_bits);
  const int32_t bits = (magnitude << (kPlaces - Code::mantissa_bits)) + kExponent;
  const auto implicit = std::bit_cast<float>(denormal & kSmallest);
  return std::bit_cast<float>(bits + (denormal & (1 << kPlaces))) - implicit;
}

// `number` with the product's sign. If `code` is infinity or NaN, returns infinity with that sign
// or kNan instead.
template <typename Code>
MODICUM_INLINE uint32_t with_specials(uint8_t code, uint32_t number, uint32_t scale_sign) noexcept {
  const int32_t magnitude = code & 0x7f;
  const uint32_t sign = (static_cast<uint32_t>(code & 0x80) << 24) ^ scale_sign;
  if constexpr (Code::largest != Code::infinity) {
    const auto infinite = static_cast<uint32_t>(where_less(Code::largest, magnitude));
    number = (number & ~infinite) | (kInfinity & infinite);
  }
  const auto nan = static_cast<uint32_t>(where_less(Code::infinity, magnitude));
  return ((sign | number) & ~nan) | (kNan & nan);
}

template <typename Code>
MODICUM_INLINE uint32_t plain_product(uint8_t code, float scale, uint32_t scale_sign) noexcept {
  const float number = value_of<Code>(code & 0x7f) * scale;
  return with_specials<Code>(code, std::bit_cast<uint32_t>(number), scale_sign);
}

// The product of any two fp32 numbers, rounded to nearest even, in integer arithmetic.
uint32_t any_product(uint32_t a, uint32_t b) noexcept {
  const uint32_t sign = (a ^ b) & kSign;
  const uint32_t of_a = a & ~kSign;
  const uint32_t of_b = b & ~kSign;
  if (of_a > kInfinity || of_b > kInfinity) return kNan;
  if (of_a == kInfinity || of_b == kInfinity)
    return of_a == 0 || of_b == 0 ? kNan : sign | kInfinity;
  const auto significand = [](uint32_t bits) -> uint64_t {
    return (bits & 0x7fffffU) | (bits >> kPlaces != 0 ? 0x800000U : 0U);
  };
  const auto exponent = [](uint32_t bits) {
    return std::max(static_cast<int>(bits >> kPlaces), 1) + kLowest - 1;
  };
  const uint64_t product = significand(of_a) * significand(of_b);  // the value: product * 2^place
  const int place = exponent(of_a) + exponent(of_b);
  if (product == 0) return sign;
  const int top = 63 - std::countl_zero(product);
  const int drop = std::max(top - kPlaces, kLowest - place);
  if (drop > top + 1) return sign;  // below half of the smallest denormal
  uint64_t kept = product << std::max(0, -drop);
  if (drop > 0) {
    const uint64_t half = uint64_t{1} << (drop - 1);
    const uint64_t rest = product & (2 * half - 1);
    kept = product >> drop;
    kept += rest > half || (rest == half && kept % 2 == 1) ? 1 : 0;
  }
  // The implicit bit of a normal number adds 1 to the exponent, and so does a carry.
  const int64_t bits = (int64_t{place + drop - kLowest} << kPlaces) + static_cast<int64_t>(kept);
  return sign | static_cast<uint32_t>(std::min(bits, int64_t{kInfinity}));
}

// Multiplies codes by a scale of any value.
template <typename Code, typename To>
__attribute__((noinline)) void any_run(const std::byte* codes, float scale, std::byte* to,
                                       int64_t n, int64_t to_step) noexcept {
  for (int64_t i = 0; i < n; ++i) {
    const auto code = load<uint8_t>(codes, i);
    const auto number = std::bit_cast<uint32_t>(value_of<Code>(code & 0x7f));
    const uint32_t value = with_specials<Code>(code, number, 0);
    store(to, i * to_step, To::narrow(any_product(value, std::bit_cast<uint32_t>(scale))));
  }
}

template <typename Code, typename To, bool kSpread>
struct Blocks {
  ScaledCodes from;
  std::byte* to;
  int64_t n;
  int64_t to_step;

  MODICUM_INLINE void operator()() const noexcept {
    const std::byte* codes = from.codes;
    const float* scale = from.scales;
    std::byte* target = to;
    const int64_t step = kSpread ? to_step : 1;
    const int64_t bytes_per_step = step * static_cast<int64_t>(sizeof(typename To::Bits));
    int64_t left = n;
    int64_t in_block = from.block - from.into_block;  // codes of the current block, from `codes` on
    for (; left > 0; in_block = from.block, ++scale) {
      const int64_t count = std::min(in_block, left);
      block(codes, *scale, target, count, step);
      codes += count;
      target += count * bytes_per_step;
      left -= count;
    }
  }

  static MODICUM_INLINE void block(const std::byte* codes, float scale, std::byte* target,
                                   int64_t count, int64_t step) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(scale);
    if ((bits & ~kSign) < kPlainFrom || (bits & ~kSign) > kPlainTo) {
      return any_run<Code, To>(codes, scale, target, count, step);
    }
    const std::byte* __restrict source = codes;
    std::byte* __restrict out = target;
    const auto magnitude = std::bit_cast<float>(bits & ~kSign);
    const uint32_t sign = bits & kSign;
    for (int64_t i = 0; i < count; ++i) {
      const auto code = load<uint8_t>(source, i);
      store(out, i * step, To::narrow(plain_product<Code>(code, magnitude, sign)));
    }
  }
};

template <typename Code, typename To>
void blocks(const ScaledCodes& from, std::byte* to, int64_t n, int64_t to_step) noexcept {
  if (to_step == 1) return run_widest(Blocks<Code, To, false>{from, to, n, 1});
  Blocks<Code, To, true>{from, to, n, to_step}();
}

template <typename Code>
void blocks_to(const ScaledCodes& from, std::byte* to, DType to_dtype, int64_t n,
               int64_t to_step) noexcept {
  switch (to_dtype) {
    case DType::f32: return blocks<Code, Fp32>(from, to, n, to_step);
    case DType::bf16: return blocks<Code, Bf16>(from, to, n, to_step);
    case DType::f16: return blocks<Code, Fp16>(from, to, n, to_step);
    default: assert(!"codes dequantised to a dtype that is never cast to");
  }
}

// 2^(byte - 127); 2^-127 is denormal.
uint32_t power_of_byte(uint8_t byte) noexcept {
  return byte == 0 ? 1U << (kPlaces - 1) : static_cast<uint32_t>(byte) << kPlaces;
}

}  // namespace

void widen_scales(const std::byte* from, DType dtype, int64_t n, float* to) noexcept {
  if (is_castable(dtype)) return cast(from, dtype, reinterpret_cast<std::byte*>(to), DType::f32, n);
  assert(is_scale_dtype(dtype));
  for (int64_t i = 0; i < n; ++i) {
    const auto byte = load<uint8_t>(from, i);
    const bool is_nan = dtype == DType::f8_e8m0 && byte == 0xff;
    to[i] = std::bit_cast<float>(is_nan ? kNan : power_of_byte(byte));
  }
}

void dequant(const ScaledCodes& from, std::byte* to, DType to_dtype, int64_t n,
             int64_t to_step) noexcept {
  switch (from.dtype) {
    case DType::f8_e4m3: return blocks_to<E4m3>(from, to, to_dtype, n, to_step);
    case DType::f8_e5m2: return blocks_to<E5m2>(from, to, to_dtype, n, to_step);
    default: assert(!"no FP8 codes");
  }
}

}  // namespace modicum
