#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// The reference computes with long double and rounds here. It shares no code with the kernels.
struct Format {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kF32{8, 23};
constexpr Format kBf16{8, 7};
constexpr Format kF16{5, 10};

int bias_of(Format f) { return (1 << (f.exponent_bits - 1)) - 1; }

long double decode(uint32_t bits, Format f) {
  const auto mantissa = static_cast<long double>(bits & ((1U << f.mantissa_bits) - 1));
  const int field = static_cast<int>(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const bool negative = (bits >> (f.mantissa_bits + f.exponent_bits)) & 1U;
  const long double implicit = field == 0 ? 0 : std::ldexp(1.0L, f.mantissa_bits);
  const int exponent = (field == 0 ? 1 : field) - bias_of(f) - f.mantissa_bits;
  long double value = std::ldexp(mantissa + implicit, exponent);
  if (field == (1 << f.exponent_bits) - 1) {
    value = mantissa != 0 ? std::numeric_limits<long double>::quiet_NaN()
                          : std::numeric_limits<long double>::infinity();
  }
  return negative ? -value : value;
}

long double round_half_even(long double value) {
  const long double floor = std::floor(value);
  const long double rest = value - floor;
  const bool floor_is_odd = std::fmod(floor, 2.0L) != 0;
  return rest > 0.5L || (rest == 0.5L && floor_is_odd) ? floor + 1 : floor;
}

// `value` must not be NaN.
uint32_t encode(long double value, Format f) {
  const uint32_t sign = (std::signbit(value) ? 1U : 0U) << (f.mantissa_bits + f.exponent_bits);
  const uint32_t infinity = ((1U << f.exponent_bits) - 1) << f.mantissa_bits;
  const long double magnitude = std::fabs(value);
  if (std::isinf(value)) return sign | infinity;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
  const int lowest = 2 - bias_of(f);
  exponent = std::max(exponent, lowest);
  const long double places = round_half_even(std::ldexp(magnitude, f.mantissa_bits + 1 - exponent));
  // The implicit bit of a normal number adds 1 to the exponent, and so does a carry.
  const auto field = static_cast<uint32_t>(exponent - lowest);
  const auto number = (field << f.mantissa_bits) + static_cast<uint32_t>(places);
  return sign | std::min(number, infinity);
}

template <typename To, typename From>
std::vector<To> cast_all(const std::vector<From>& from, DType from_dtype, DType to_dtype) {
  std::vector<To> to(from.size());
  cast(reinterpret_cast<const std::byte*>(from.data()), from_dtype,
       reinterpret_cast<std::byte*>(to.data()), to_dtype, static_cast<int64_t>(from.size()));
  return to;
}

std::vector<uint16_t> all_16_bits() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

// Every 4099th pattern (a prime), and the patterns around every exponent and half-way point.
std::vector<uint32_t> sample_of_fp32() {
  std::vector<uint32_t> sample;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4099) {
    sample.push_back(static_cast<uint32_t>(bits));
  }
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 0x1000) {
    for (int d = -1; d <= 1; ++d) sample.push_back(static_cast<uint32_t>(bits) + d);
  }
  return sample;
}

template <typename To, typename From>
void expect_as_reference(const std::vector<From>& from, DType from_dtype, Format from_format,
                         DType to_dtype, Format to_format) {
  const std::vector<To> to = cast_all<To>(from, from_dtype, to_dtype);
  int64_t wrong = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    const long double value = decode(from[i], from_format);
    const bool is_right = std::isnan(value) ? std::isnan(decode(to[i], to_format))
                                            : to[i] == encode(value, to_format);
    if (!is_right && ++wrong <= 5) {
      ADD_FAILURE() << std::hex << from[i] << " became " << to[i] << " and not "
                    << encode(value, to_format);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(CopyStreaming, CopiesEveryByteAndNoMore) {
  constexpr size_t kSize = 4096;
  std::vector<std::byte> memory(3 * kSize + 64);
  std::byte* const from = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  std::byte* const to = from + kSize;
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    synth_fill(1, DType::u8, 0, kSize, from);
    synth_fill(2, DType::u8, 0, 2 * kSize - 64, to);
    const std::vector<std::byte> behind(to + kSize, to + 2 * kSize - 64);
    copy_streaming(from, to, kSize);
    EXPECT_EQ(std::memcmp(from, to, kSize), 0) << isa;
    EXPECT_TRUE(std::equal(behind.begin(), behind.end(), to + kSize)) << isa;
  }
  use_isa(isas().front());
}

TEST(Cast, ReferenceGivesKnownValues) {
  EXPECT_EQ(encode(1.0L, kF32), 0x3f800000U);
  EXPECT_EQ(encode(-65504.0L, kF16), 0xfbffU);
  EXPECT_EQ(encode(65520.0L, kF16), 0x7c00U);
  EXPECT_EQ(encode(std::ldexp(1.0L, -24), kF16), 1U);
  EXPECT_EQ(encode(std::ldexp(1.0L, -25), kF16), 0U);
  EXPECT_EQ(encode(std::ldexp(3.0L, -25), kF16), 2U);
  EXPECT_EQ(decode(0x0001, kBf16), std::ldexp(1.0L, -133));
  for (uint32_t i = 0; i < 65536; ++i) {
    const long double value = decode(i, kF16);
    if (!std::isnan(value)) {
      EXPECT_EQ(encode(value, kF16), i);
    }
  }
}

TEST(Cast, EveryBf16AgreesWithTheReference) {
  const auto all = all_16_bits();
  expect_as_reference<uint32_t>(all, DType::bf16, kBf16, DType::f32, kF32);
  expect_as_reference<uint16_t>(all, DType::bf16, kBf16, DType::f16, kF16);
}

TEST(Cast, EveryFp16AgreesWithTheReference) {
  const auto all = all_16_bits();
  expect_as_reference<uint32_t>(all, DType::f16, kF16, DType::f32, kF32);
  expect_as_reference<uint16_t>(all, DType::f16, kF16, DType::bf16, kBf16);
}

TEST(Cast, ASweepOfFp32AgreesWithTheReference) {
  const auto sample = sample_of_fp32();
  expect_as_reference<uint16_t>(sample, DType::f32, kF32, DType::bf16, kBf16);
  expect_as_reference<uint16_t>(sample, DType::f32, kF32, DType::f16, kF16);
}

TEST(Cast, NarrowTypesSurviveARoundTrip) {
  const auto all = all_16_bits();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Format format = dtype == DType::bf16 ? kBf16 : kF16;
    const auto wide = cast_all<uint32_t>(all, dtype, DType::f32);
    const auto back = cast_all<uint16_t>(wide, DType::f32, dtype);
    for (size_t i = 0; i < all.size(); ++i) {
      if (!std::isnan(decode(all[i], format))) {
        ASSERT_EQ(back[i], all[i]);
      }
    }
  }
}

TEST(Cast, NansKeepTheDocumentedBits) {
  const std::vector<uint32_t> wide = {0x7f800001, 0x7fc00000, 0xffffffff, 0xffc00000, 0x7fa12345};
  for (const uint16_t bits : cast_all<uint16_t>(wide, DType::f32, DType::bf16)) {
    EXPECT_EQ(bits, 0x7fc0);
  }
  const std::vector<uint16_t> to_f16 = {0x7e00, 0x7e00, 0xffff, 0xfe00, 0x7f09};
  EXPECT_EQ((cast_all<uint16_t>(wide, DType::f32, DType::f16)), to_f16);
  const std::vector<uint16_t> half = {0x7c01, 0x7fff, 0xffff, 0xfe00, 0x7d55};
  const std::vector<uint32_t> from_f16 = {0x7fc02000, 0x7fffe000, 0xffffe000, 0xffc00000,
                                          0x7feaa000};
  EXPECT_EQ((cast_all<uint32_t>(half, DType::f16, DType::f32)), from_f16);
  const std::vector<uint16_t> brain = {0x7f81, 0x7fff, 0xffc0};
  const std::vector<uint32_t> from_bf16 = {0x7f810000, 0x7fff0000, 0xffc00000};
  EXPECT_EQ((cast_all<uint32_t>(brain, DType::bf16, DType::f32)), from_bf16);
}

struct Pair {
  DType from;
  DType to;
};

std::vector<Pair> castable_pairs() {
  std::vector<Pair> pairs;
  for (const DType from : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType to : {DType::f32, DType::bf16, DType::f16}) pairs.push_back({from, to});
  }
  return pairs;
}

std::vector<std::byte> pattern_bytes(size_t n) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 7);
  return bytes;
}

// Casts one aligned element at a time: the reference for longer and unaligned runs.
std::vector<std::byte> cast_one_by_one(const std::byte* from, Pair pair, int64_t n) {
  const int64_t from_bytes = bytes_per_element(pair.from);
  const int64_t to_bytes = bytes_per_element(pair.to);
  std::vector<std::byte> to(static_cast<size_t>(n * to_bytes));
  for (int64_t i = 0; i < n; ++i) {
    alignas(8) std::byte in[8];
    alignas(8) std::byte out[8];
    std::memcpy(in, from + i * from_bytes, static_cast<size_t>(from_bytes));
    cast(in, pair.from, out, pair.to, 1);
    std::memcpy(to.data() + i * to_bytes, out, static_cast<size_t>(to_bytes));
  }
  return to;
}

TEST(Cast, AnyLengthAndAlignmentGivesTheSameBits) {
  const auto source = pattern_bytes(1024);
  for (const Pair pair : castable_pairs()) {
    for (int64_t n = 0; n < 70; ++n) {
      for (size_t offset = 0; offset < 5; ++offset) {
        const auto expected = cast_one_by_one(source.data() + offset, pair, n);
        std::vector<std::byte> to(expected.size() + 16, std::byte{0xab});
        cast(source.data() + offset, pair.from, to.data() + 3, pair.to, n);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to.begin() + 3));
        EXPECT_EQ(to[2], std::byte{0xab});
        EXPECT_EQ(to[3 + expected.size()], std::byte{0xab});
      }
    }
  }
}

TEST(CastStrided, WritesEveryElementAtItsStepOnly) {
  const auto source = pattern_bytes(256);
  for (const Pair pair : castable_pairs()) {
    const int64_t n = 21;
    const auto size = static_cast<size_t>(bytes_per_element(pair.to));
    const auto expected = cast_one_by_one(source.data() + 1, pair, n);
    for (const int64_t step : {1, 2, 3, 7}) {
      std::vector<std::byte> to(static_cast<size_t>(n * step) * size + 1, std::byte{0xab});
      cast_strided(source.data() + 1, pair.from, to.data() + 1, pair.to, n, step);
      for (size_t slot = 0; slot < static_cast<size_t>(n * step); ++slot) {
        const std::byte* got = to.data() + 1 + slot * size;
        const bool is_element = slot % static_cast<size_t>(step) == 0;
        const std::vector<std::byte> untouched(size, std::byte{0xab});
        const std::byte* want = is_element
                                    ? expected.data() + slot / static_cast<size_t>(step) * size
                                    : untouched.data();
        ASSERT_EQ(std::memcmp(got, want, size), 0);
      }
    }
  }
}

TEST(CastStrided, CopiesOtherDtypes) {
  const std::vector<uint64_t> from = {1, uint64_t{2} << 40, 3};
  std::vector<uint64_t> to(9, 7);
  cast_strided(reinterpret_cast<const std::byte*>(from.data()), DType::i64,
               reinterpret_cast<std::byte*>(to.data()), DType::i64, 3, 3);
  EXPECT_EQ(to, (std::vector<uint64_t>{1, 7, 7, uint64_t{2} << 40, 7, 7, 3, 7, 7}));
}

TEST(Cast, TheSameDtypeCopiesAlsoBelowAByte) {
  for (const DType dtype : {DType::f4, DType::f6_e2m3, DType::u8, DType::i64}) {
    const int64_t n = 8;
    std::vector<std::byte> to(64, std::byte{0xab});
    const auto big = pattern_bytes(64);
    cast(big.data(), dtype, to.data(), dtype, n);
    const size_t copied = bytes_of(dtype, n);
    EXPECT_EQ(std::memcmp(to.data(), big.data(), copied), 0);
    if (copied < to.size()) {
      EXPECT_EQ(to[copied], std::byte{0xab});
    }
  }
}

}  // namespace
}  // namespace modicum
