#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr DType kTargets[] = {DType::f32, DType::bf16, DType::f16};
constexpr DType kCodes[] = {DType::f8_e4m3, DType::f8_e5m2};

// The reference: the value of a code as docs/reference/formats.md defines it, by ldexp.
long double value_of(uint8_t code, DType dtype) {
  const int mantissa_bits = dtype == DType::f8_e4m3 ? 3 : 2;
  const int bias = dtype == DType::f8_e4m3 ? 7 : 15;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = (code & 0x7f) >> mantissa_bits;
  long double value = std::ldexp(static_cast<long double>(mantissa), 1 - bias - mantissa_bits);
  if (exponent > 0) {
    value = std::ldexp(static_cast<long double>(mantissa + (1 << mantissa_bits)),
                       exponent - bias - mantissa_bits);
  }
  if (dtype == DType::f8_e4m3 && (code & 0x7f) == 0x7f) value = std::nanl("");
  if (dtype == DType::f8_e5m2 && exponent == 31) {
    value = mantissa == 0 ? std::numeric_limits<long double>::infinity() : std::nanl("");
  }
  return (code & 0x80) != 0 ? -value : value;
}

// A product of 4 and 24 bits is exact as a long double; the conversion rounds once.
std::vector<std::byte> reference(uint8_t code, DType dtype, float scale, DType to) {
  const auto product = static_cast<float>(value_of(code, dtype) * static_cast<long double>(scale));
  std::vector<std::byte> values(static_cast<size_t>(bytes_per_element(to)));
  if (std::isnan(product)) {
    const uint32_t nan = to == DType::f32 ? 0x7fc00000U : to == DType::bf16 ? 0x7fc0U : 0x7e00U;
    std::memcpy(values.data(), &nan, values.size());
    return values;
  }
  cast(reinterpret_cast<const std::byte*>(&product), DType::f32, values.data(), to, 1);
  return values;
}

std::vector<std::byte> all_codes() {
  std::vector<std::byte> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i);
  return codes;
}

// Scales of every kind, and on both sides of kPlainFrom and kPlainTo in dequant.cc.
std::vector<float> scales() {
  std::vector<float> some;
  for (const uint32_t bits :
       {0x3f800000U, 0x3a83126fU, 0x40490fdbU, 0x00000000U, 0x00000001U, 0x00400000U, 0x007fffffU,
        0x00800000U, 0x0d7fffffU, 0x0d800000U, 0x0d800001U, 0x717fffffU, 0x71800000U, 0x71800001U,
        0x7f000000U, 0x7f7fffffU, 0x7f800000U, 0x7f800001U, 0x7fc00000U, 0x7fffffffU}) {
    some.push_back(std::bit_cast<float>(bits));
    some.push_back(std::bit_cast<float>(bits | 0x80000000U));
  }
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i)
    some.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  for (int i = 0; i < 200; ++i)
    some.push_back(std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x007fffffU));
  return some;
}

std::vector<std::byte> dequant_all(DType dtype, float scale, DType to, int64_t step = 1) {
  const auto codes = all_codes();
  const auto size = static_cast<size_t>(bytes_per_element(to));
  std::vector<std::byte> values(256 * size * static_cast<size_t>(step));
  dequant({codes.data(), dtype, &scale, 0, 256}, values.data(), to, 256, step);
  return values;
}

TEST(Dequant, ReferenceGivesKnownValues) {
  EXPECT_EQ(value_of(0x7e, DType::f8_e4m3), 448.0L);
  EXPECT_EQ(value_of(0x81, DType::f8_e4m3), -std::ldexp(1.0L, -9));
  EXPECT_EQ(value_of(0x7b, DType::f8_e5m2), 57344.0L);
  EXPECT_EQ(value_of(0x01, DType::f8_e5m2), std::ldexp(1.0L, -16));
  EXPECT_TRUE(std::isinf(value_of(0xfc, DType::f8_e5m2)));
}

// All codes, many scales, three target dtypes. Must fail if a product is not rounded to nearest
// even in fp32, denormals are flushed, or NaNs have other bits.
TEST(Dequant, EveryCodeTimesManyScalesAgreesWithTheReference) {
  for (const DType dtype : kCodes) {
    for (const DType to : kTargets) {
      const auto size = static_cast<size_t>(bytes_per_element(to));
      for (const float scale : scales()) {
        const std::vector<std::byte> values = dequant_all(dtype, scale, to);
        for (size_t code = 0; code < 256; ++code) {
          const auto due = reference(static_cast<uint8_t>(code), dtype, scale, to);
          ASSERT_EQ(std::memcmp(values.data() + code * size, due.data(), size), 0)
              << "code " << code << " of " << stored_name(dtype) << " times " << scale << " as "
              << torch_name(to);
        }
      }
    }
  }
}

// Strided output is not vectorised and must give the same bits.
TEST(Dequant, StridedOutputHasTheSameBits) {
  for (const DType dtype : kCodes) {
    for (const DType to : kTargets) {
      const auto size = static_cast<size_t>(bytes_per_element(to));
      for (const float scale : {0.37F, 1e-40F, 3e38F}) {
        const auto dense = dequant_all(dtype, scale, to);
        const auto spread = dequant_all(dtype, scale, to, 3);
        for (size_t i = 0; i < 256; ++i) {
          ASSERT_EQ(std::memcmp(dense.data() + i * size, spread.data() + 3 * i * size, size), 0);
          for (size_t b = size; b < 3 * size; ++b) {
            ASSERT_EQ(spread[3 * i * size + b], std::byte{});
          }
        }
      }
    }
  }
}

// Must fail if a code gets the scale of an adjacent block.
TEST(Dequant, EachBlockHasItsOwnScale) {
  std::vector<float> grid(400);
  for (size_t i = 0; i < grid.size(); ++i) grid[i] = 1.0F + static_cast<float>(i);
  std::vector<std::byte> codes(400);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i * 37 % 126);
  for (const int64_t block : {1, 2, 3, 7, 128, 300, 1000}) {
    for (const int64_t in_block : {int64_t{0}, int64_t{1}, block - 1}) {
      if (in_block >= block) continue;
      for (const int64_t n : {0, 1, 127, 128, 129, 400}) {
        std::vector<float> values(400, -1.0F);
        dequant({codes.data(), DType::f8_e4m3, grid.data(), in_block, block},
                reinterpret_cast<std::byte*>(values.data()), DType::f32, n);
        for (int64_t i = 0; i < 400; ++i) {
          const auto at = static_cast<size_t>(i);
          const auto code = static_cast<uint8_t>(codes[at]);
          const auto due = static_cast<float>(value_of(code, DType::f8_e4m3)) *
                           grid[static_cast<size_t>((in_block + i) / block)];
          ASSERT_EQ(values[at], i < n ? due : -1.0F)
              << block << " " << in_block << " " << n << " " << i;
        }
      }
    }
  }
}

#if defined(__x86_64__)
TEST(Dequant, FlushToZeroModesDoNotMatter) {
  const unsigned before = _mm_getcsr();
  for (const DType dtype : kCodes) {
    for (const DType to : kTargets) {
      for (const float scale : scales()) {
        const auto plain = dequant_all(dtype, scale, to);
        _mm_setcsr(before | 0x8040U);
        const auto flushing = dequant_all(dtype, scale, to);
        _mm_setcsr(before);
        ASSERT_EQ(plain, flushing) << scale;
      }
    }
  }
}
#endif

TEST(WidenScales, AreExactInEveryDType) {
  for (const DType dtype : {DType::u8, DType::f8_e8m0}) {
    const auto bytes = all_codes();
    std::vector<float> wide(256);
    widen_scales(bytes.data(), dtype, 256, wide.data());
    for (int b = 0; b < 255; ++b) ASSERT_EQ(wide[static_cast<size_t>(b)], std::ldexp(1.0, b - 127));
    if (dtype == DType::u8) {
      EXPECT_TRUE(std::isinf(wide[255]));
    } else {
      EXPECT_TRUE(std::isnan(wide[255]));
    }
  }
  const std::vector<float> some = {1.5F, -0.25F, 1e-40F};
  for (const DType dtype : kTargets) {
    std::vector<std::byte> stored(12);
    std::vector<float> due(3), wide(3);
    cast(reinterpret_cast<const std::byte*>(some.data()), DType::f32, stored.data(), dtype, 3);
    cast(stored.data(), dtype, reinterpret_cast<std::byte*>(due.data()), DType::f32, 3);
    widen_scales(stored.data(), dtype, 3, wide.data());
    EXPECT_EQ(wide, due);
  }
}

}  // namespace
}  // namespace modicum
