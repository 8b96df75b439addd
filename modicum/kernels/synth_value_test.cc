#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr uint64_t kTensor = 0x0123456789abcdef;

std::vector<std::byte> filled(DType dtype, int64_t first, int64_t n, uint64_t tensor = kTensor) {
  std::vector<std::byte> bytes(bytes_of(dtype, n));
  synth_fill(tensor, dtype, first, n, bytes.data());
  return bytes;
}

template <typename T>
std::vector<T> values(DType dtype, int64_t first, int64_t n) {
  const auto bytes = filled(dtype, first, n);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class SynthFill : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};

TEST_P(SynthFill, IsIndependentOfTheDivision) {
  const int64_t n = 96;
  const auto whole = filled(dtype(), 0, n);
  const int64_t step = bits_per_element(dtype()) < 8 ? 4 : 1;
  for (int64_t first = 0; first <= n; first += step) {
    const auto head = filled(dtype(), 0, first);
    const auto tail = filled(dtype(), first, n - first);
    std::vector<std::byte> joined = head;
    joined.insert(joined.end(), tail.begin(), tail.end());
    ASSERT_EQ(joined, whole);
  }
}

TEST_P(SynthFill, WritesItsElementsOnlyAtAnyAlignment) {
  const auto expected = filled(dtype(), 8, 40);
  for (size_t offset = 1; offset < 8; ++offset) {
    std::vector<std::byte> to(expected.size() + 16, std::byte{0xab});
    synth_fill(kTensor, dtype(), 8, 40, to.data() + offset);
    EXPECT_EQ(std::memcmp(to.data() + offset, expected.data(), expected.size()), 0);
    EXPECT_EQ(to[offset - 1], std::byte{0xab});
    EXPECT_EQ(to[offset + expected.size()], std::byte{0xab});
  }
}

TEST_P(SynthFill, DiffersFromTensorToTensor) {
  EXPECT_NE(filled(dtype(), 0, 64, 1), filled(dtype(), 0, 64, 2));
}

std::string name_of(const testing::TestParamInfo<int>& info) {
  return std::string(stored_name(static_cast<DType>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(AllDtypes, SynthFill, testing::Range(0, static_cast<int>(DType::count)),
                         name_of);

constexpr int64_t kMany = 100'000;

template <typename T>
void expect_in_band(const std::vector<T>& numbers) {
  int64_t negative = 0;
  for (const T x : numbers) {
    ASSERT_GE(std::fabs(x), T{0x1p-16});
    ASSERT_LT(std::fabs(x), T{1});
    negative += std::signbit(x) ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(negative) / static_cast<double>(numbers.size()), 0.5, 0.02);
}

TEST(SynthValue, FloatsAreFiniteAndOfModestSize) {
  expect_in_band(values<float>(DType::f32, 0, kMany));
  expect_in_band(values<double>(DType::f64, 0, kMany));
  expect_in_band(values<float>(DType::c64, 0, kMany));
  std::vector<float> brain;
  for (const uint16_t bits : values<uint16_t>(DType::bf16, 0, kMany)) {
    brain.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  }
  expect_in_band(brain);
}

TEST(SynthValue, Bf16IsTheUpperHalfOfFp32) {
  const auto wide = values<uint32_t>(DType::f32, 77, 1000);
  const auto brain = values<uint16_t>(DType::bf16, 77, 1000);
  for (size_t i = 0; i < wide.size(); ++i) EXPECT_EQ(brain[i], wide[i] >> 16);
}

TEST(SynthValue, Fp16IsFiniteAndSometimesDenormal) {
  int64_t denormals = 0;
  for (const uint16_t bits : values<uint16_t>(DType::f16, 0, kMany)) {
    ASSERT_LT(bits & 0x7fff, 0x3c00);  // below 1
    denormals += (bits & 0x7c00) == 0 ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(denormals) / kMany, 2.0 / 16, 0.01);
}

std::set<uint8_t> codes(DType dtype) {
  const auto all = values<uint8_t>(dtype, 0, kMany);
  return {all.begin(), all.end()};
}

TEST(SynthValue, Fp8IsEveryFiniteCodeAndNoOther) {
  std::set<uint8_t> e5m2;
  std::set<uint8_t> e4m3;
  std::set<uint8_t> e8m0;
  std::set<uint8_t> fnuz;
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    if ((code & 0x7c) != 0x7c) e5m2.insert(byte);
    if ((code & 0x7f) != 0x7f) e4m3.insert(byte);
    if (code != 0xff) e8m0.insert(byte);
    if (code != 0x80) fnuz.insert(byte);
  }
  EXPECT_EQ(codes(DType::f8_e5m2), e5m2);
  EXPECT_EQ(codes(DType::f8_e4m3), e4m3);
  EXPECT_EQ(codes(DType::f8_e8m0), e8m0);
  EXPECT_EQ(codes(DType::f8_e4m3fnuz), fnuz);
  EXPECT_EQ(codes(DType::f8_e5m2fnuz), fnuz);
}

TEST(SynthValue, BoolIsZeroOrOneAndIntegersAreAnything) {
  EXPECT_EQ(codes(DType::boolean), (std::set<uint8_t>{0, 1}));
  EXPECT_EQ(codes(DType::u8).size(), 256U);
  EXPECT_EQ(codes(DType::f4).size(), 256U);
  EXPECT_EQ(codes(DType::f6_e2m3).size(), 256U);
}

// The values of synthesised files, computed by an independent program; they must never change.
TEST(SynthValue, MatchesTheGoldenNumbers) {
  EXPECT_EQ(values<uint32_t>(DType::f32, 0, 4),
            (std::vector<uint32_t>{0x3cfa3807, 0xbcf3529b, 0x3f10b72e, 0xba541933}));
  EXPECT_EQ(values<uint16_t>(DType::bf16, 0, 4),
            (std::vector<uint16_t>{0x3cfa, 0xbcf3, 0x3f10, 0xba54}));
  EXPECT_EQ(values<uint16_t>(DType::f16, 0, 4),
            (std::vector<uint16_t>{0x117a, 0x9173, 0x2b90, 0x9ed4}));
  EXPECT_EQ(values<uint64_t>(DType::f64, 0, 2),
            (std::vector<uint64_t>{0x3f6a3807a48faa9d, 0xbf63529b34a1d093}));
  EXPECT_EQ(values<uint64_t>(DType::i64, 0, 2),
            (std::vector<uint64_t>{0x157a3807a48faa9d, 0xd573529b34a1d093}));
  EXPECT_EQ(values<uint8_t>(DType::u8, 0, 4), (std::vector<uint8_t>{0x15, 0xd5, 0x2f, 0xa2}));
  EXPECT_EQ(values<uint8_t>(DType::f4, 0, 4), (std::vector<uint8_t>{0xd1, 0xa2}));
  EXPECT_EQ(values<uint32_t>(DType::f32, int64_t{1} << 40, 1), std::vector<uint32_t>{0x37b2e914});
}

TEST(DigestValue, MatchesTheGoldenNumber) {
  const std::vector<uint32_t> bits = {0x3f800000, 0xbf800000, 1};
  EXPECT_EQ(digest_run(7, reinterpret_cast<const std::byte*>(bits.data()), 4, 100, 3),
            0xde9ae3dc78796c9dU);
}

}  // namespace
}  // namespace modicum
