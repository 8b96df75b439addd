#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr int64_t kBytes = 8 * 41;

std::vector<std::byte> some_bytes() {
  std::vector<std::byte> bytes(kBytes);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 29 + i / 11);
  return bytes;
}

uint64_t digest(const std::vector<std::byte>& bytes, int size, uint64_t seed = 5) {
  return digest_run(seed, bytes.data(), size, 0, static_cast<int64_t>(bytes.size()) / size);
}

class DigestRun : public testing::TestWithParam<int> {};

TEST_P(DigestRun, IsTheSameForEveryDivision) {
  const int size = GetParam();
  const auto bytes = some_bytes();
  const int64_t n = kBytes / size;
  const uint64_t whole = digest(bytes, size);
  for (int64_t cut = 0; cut <= n; ++cut) {
    const uint64_t head = digest_run(5, bytes.data(), size, 0, cut);
    const uint64_t tail = digest_run(5, bytes.data() + cut * size, size, cut, n - cut);
    ASSERT_EQ(head + tail, whole);
  }
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += digest_run(5, bytes.data() + i * size, size, i, 1);
  EXPECT_EQ(sum, whole);
}

TEST_P(DigestRun, ChangesWithEveryBit) {
  const auto bytes = some_bytes();
  std::set<uint64_t> seen = {digest(bytes, GetParam())};
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    auto changed = bytes;
    changed[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    seen.insert(digest(changed, GetParam()));
  }
  EXPECT_EQ(seen.size(), bytes.size() * 8 + 1);
}

TEST_P(DigestRun, ChangesWhenTwoElementsAreExchanged) {
  const int size = GetParam();
  const auto bytes = some_bytes();
  const uint64_t whole = digest(bytes, size);
  for (size_t i = 0; i < kBytes; i += static_cast<size_t>(size)) {
    for (size_t j = 0; j < i; j += static_cast<size_t>(size)) {
      auto changed = bytes;
      for (int k = 0; k < size; ++k) std::swap(changed[i + k], changed[j + k]);
      if (changed != bytes) {
        ASSERT_NE(digest(changed, size), whole);
      }
    }
  }
}

TEST_P(DigestRun, ChangesWithSeedAndPlaceAndLength) {
  const int size = GetParam();
  const auto bytes = some_bytes();
  const std::vector<std::byte> zeros(kBytes);
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 100; ++seed) seen.insert(digest(bytes, size, seed));
  for (int64_t first = 1; first < 100; ++first) {
    seen.insert(digest_run(0, bytes.data(), size, first, kBytes / size));
  }
  for (int64_t n = 1; n <= kBytes / size; ++n) {
    seen.insert(digest_run(0, zeros.data(), size, 0, n));
  }
  EXPECT_EQ(seen.size(), 199U + kBytes / static_cast<size_t>(size));
  EXPECT_EQ(digest_run(0, zeros.data(), size, 9, 0), 0U);
}

TEST_P(DigestRun, NeedsNoAlignment) {
  const int size = GetParam();
  const auto bytes = some_bytes();
  for (size_t offset = 1; offset < 8; ++offset) {
    std::vector<std::byte> moved(offset);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    EXPECT_EQ(digest_run(5, moved.data() + offset, size, 0, kBytes / size), digest(bytes, size));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, DigestRun, testing::Values(1, 2, 4, 8));

// Flipping any bit of an element must change half of the sum's bits on average.
TEST(DigestRunMixing, SpreadsOneBitOverTheSum) {
  int64_t changed_bits = 0;
  int64_t trials = 0;
  for (uint64_t element = 0; element < 64; ++element) {
    for (int bit = 0; bit < 64; ++bit, ++trials) {
      const uint64_t other = element ^ (uint64_t{1} << bit);
      const auto* a = reinterpret_cast<const std::byte*>(&element);
      const auto* b = reinterpret_cast<const std::byte*>(&other);
      const int64_t index = static_cast<int64_t>(element);
      changed_bits +=
          __builtin_popcountll(digest_run(0, a, 8, index, 1) ^ digest_run(0, b, 8, index, 1));
    }
  }
  EXPECT_NEAR(static_cast<double>(changed_bits) / static_cast<double>(trials), 32.0, 0.5);
}

// 2 1/2 blocks of words, and a part of a word.
std::vector<std::byte> some_blocks() {
  std::vector<std::byte> bytes(20 * 1024 + 3);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte((i * 29 + i / 251) % 256);
  return bytes;
}

TEST(ChecksumRun, IsTheSameForEveryDivision) {
  const auto bytes = some_blocks();
  const std::span<const std::byte> all(bytes);
  const uint64_t whole = checksum_run(5, 0, all);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    ASSERT_EQ(checksum_run(5, 0, all.first(cut)) + checksum_run(5, cut, all.subspan(cut)), whole);
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes.size(); ++i) sum += checksum_run(5, i, all.subspan(i, 1));
  EXPECT_EQ(sum, whole);
}

TEST(ChecksumRun, ChangesWithEveryBitOfAWord) {
  for (const uint64_t at : {uint64_t{0}, uint64_t{8188}, uint64_t{8192}, uint64_t{1} << 40}) {
    std::set<uint64_t> seen;
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t word = 1U << bit;
      seen.insert(checksum_run(5, at, std::as_bytes(std::span(&word, 1))));
    }
    EXPECT_EQ(seen.size(), 32U);
    EXPECT_FALSE(seen.contains(0));
  }
}

TEST(ChecksumRun, ChangesWhenWordsAreExchanged) {
  const auto bytes = some_blocks();
  const uint64_t whole = checksum_run(5, 0, bytes);
  for (const size_t other : {4U, 8U, 4096U, 8192U, 16384U}) {
    auto changed = bytes;
    std::swap_ranges(changed.begin(), changed.begin() + 4, changed.begin() + other);
    ASSERT_NE(changed, bytes);
    EXPECT_NE(checksum_run(5, 0, changed), whole) << other;
  }
}

TEST(ChecksumRun, DependsOnSeedAndPlace) {
  const auto bytes = some_bytes();
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 100; ++seed) seen.insert(checksum_run(seed, 0, bytes));
  for (uint64_t at = 1; at < 100; ++at) seen.insert(checksum_run(0, at, bytes));
  EXPECT_EQ(seen.size(), 199U);
}

// Catches: other factors, with which every recorded step would count as damaged.
TEST(ChecksumRun, HasTheRecordedFactors) {
  EXPECT_EQ(checksum_run(5, 0, some_blocks()), 5307720348423158556U);
  EXPECT_EQ(checksum_run(5, 0, std::vector<std::byte>(100)), 0U);
}

TEST(NameHash, IsXxh3) {
  EXPECT_EQ(name_hash(""), 0x2d06800538d394c2U);  // the published value for no input
  EXPECT_NE(name_hash("a"), name_hash("b"));
}

}  // namespace
}  // namespace modicum
