// Catches: a block of 256 codes overflows its counters.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

template <typename Bits>
std::vector<Bits> all_patterns() {
  std::vector<Bits> all(size_t{1} << (8 * sizeof(Bits)));
  std::iota(all.begin(), all.end(), Bits{0});
  return all;
}

template <typename T>
const std::byte* bytes(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

void expect_counts(const Specials& counts, int64_t zeros, int64_t infinities) {
  EXPECT_EQ(counts.zeros, zeros);
  EXPECT_EQ(counts.infinities, infinities);
}

TEST(Specials, EveryPatternOfADtypeIsClassified) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    expect_counts(count_specials(bytes(all_patterns<uint16_t>()), dtype, 65536), 2, 2);
  }
  expect_counts(count_specials(bytes(all_patterns<uint8_t>()), DType::f8_e5m2, 256), 2, 2);
  expect_counts(count_specials(bytes(all_patterns<uint8_t>()), DType::f8_e4m3, 256), 2, 0);
  const std::vector<float> wide = {0.F, -0.F, INFINITY, -INFINITY, NAN, 1.F, 1e-45F, 3e38F};
  expect_counts(count_specials(bytes(wide), DType::f32, 8), 2, 2);
}

TEST(Specials, AnyLengthAndStepIsCounted) {
  for (const DType dtype : {DType::f8_e4m3, DType::f16, DType::f32}) {
    const std::vector<std::byte> zeros(4 * 1100 * static_cast<size_t>(bytes_per_element(dtype)));
    for (const int64_t n : {0, 1, 31, 254, 255, 256, 257, 510, 511, 1100}) {
      expect_counts(count_specials(zeros.data(), dtype, n), n, 0);
      expect_counts(count_specials(zeros.data(), dtype, n, 4), n, 0);
    }
  }
  const std::vector<float> spread = {INFINITY, 0.F, 1.F, INFINITY, 0.F, 0.F, INFINITY};
  expect_counts(count_specials(bytes(spread), DType::f32, 3, 3), 0, 3);
}

// The counts of a cast from `from`, of which `loss` elements were expected to become infinite and
// zero. The oracle compares numbers, and shares no code with the kernels.
void expect_losses(const std::vector<float>& from, DType to, double overflows, double vanishes) {
  std::vector<uint16_t> result(from.size());
  const auto n = static_cast<int64_t>(from.size());
  cast(bytes(from), DType::f32, reinterpret_cast<std::byte*>(result.data()), to, n);
  const Specials before = count_specials(bytes(from), DType::f32, n);
  const Specials after = count_specials(bytes(result), to, n);
  int64_t overflowed = 0, underflowed = 0;
  for (const float value : from) {
    const double magnitude = std::abs(static_cast<double>(value));
    if (std::isfinite(magnitude) && magnitude >= overflows) ++overflowed;
    if (magnitude > 0 && magnitude <= vanishes) ++underflowed;
  }
  EXPECT_EQ(after.infinities - before.infinities, overflowed);
  EXPECT_EQ(after.zeros - before.zeros, underflowed);
  EXPECT_GT(overflowed, 0);
  EXPECT_GT(underflowed, 0);
}

// The bounds are halfway cases: 65520 lies between 65504 and 2^16, and rounds to the even one.
TEST(Specials, TheDifferenceOfTwoCountsIsWhatACastHasLost) {
  std::vector<float> edges;
  for (const float edge : {65504.F, 65520.F, 65536.F, 0x1p-24F, 0x1p-25F, 0x1p-26F, 0x1.ffp127F,
                           0x1.fep127F, 0x1p-133F, 0x1p-134F, 0x1p-149F, 1e6F, 0.F, INFINITY}) {
    for (const float near : {edge, std::nextafter(edge, 0.F), std::nextafter(edge, INFINITY)}) {
      edges.insert(edges.end(), {near, -near});
    }
  }
  edges.push_back(NAN);
  expect_losses(edges, DType::f16, 65520, 0x1p-25);
  expect_losses(edges, DType::bf16, 0x1.ffp127, 0x1p-134);
  std::vector<float> brain;
  for (const uint16_t bits : all_patterns<uint16_t>()) {
    brain.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  }
  expect_losses(brain, DType::f16, 65520, 0x1p-25);
}

TEST(Specials, ValuesAreThoseOfTheFormats) {
  const std::vector<uint16_t> halves = {0x3c00, 0x3f80, 0xfbff};
  EXPECT_EQ(value_at(bytes(halves), DType::f16, 0), 1.0);
  EXPECT_EQ(value_at(bytes(halves), DType::bf16, 1), 1.0);
  EXPECT_EQ(value_at(bytes(halves), DType::f16, 2), -65504.0);
  const std::vector<uint8_t> codes = {0x38, 0x3c, 0xfe};
  EXPECT_EQ(value_at(bytes(codes), DType::f8_e4m3, 0), 1.0);
  EXPECT_EQ(value_at(bytes(codes), DType::f8_e5m2, 1), 1.0);
  EXPECT_EQ(value_at(bytes(codes), DType::f8_e4m3, 2), -448.0);
}

}  // namespace
}  // namespace modicum
