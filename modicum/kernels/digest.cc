#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15U;  // odd; spreads adjacent places and seeds

// A bijection: each bit of `x` changes about half of the bits of the result.
MODICUM_INLINE constexpr uint64_t spread(uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// Hashes the place to a mask, xors the element's bits, and hashes again. Both hashes are
// bijections, so two different elements at one place never give the same number. The
// multiplications make it unlikely that changes of several (place, bits) pairs cancel in the sum.
MODICUM_INLINE uint64_t mix(uint64_t place, uint64_t bits) noexcept {
  uint64_t x = (place ^ (place >> 32)) * 0xd6e8feb86659fd93U;
  return spread(x ^ (x >> 32) ^ bits);
}

template <typename Bits>
struct Sum {
  uint64_t place;  // seed + index * kStep of the first element
  const std::byte* elements;
  int64_t n;
  uint64_t* total;

  MODICUM_INLINE void operator()() const noexcept {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      Bits bits;
      std::memcpy(&bits, elements + i * static_cast<int64_t>(sizeof bits), sizeof bits);
      sum += mix(place + static_cast<uint64_t>(i) * kStep, bits);
    }
    *total = sum;
  }
};

template <typename Bits>
uint64_t sum(uint64_t seed, const std::byte* elements, int64_t first, int64_t n) noexcept {
  uint64_t total = 0;
  const uint64_t place = seed + static_cast<uint64_t>(first) * kStep;
  run_widest(Sum<Bits>{place, elements, n, &total});
  return total;
}

}  // namespace

namespace {

// Words are weighted by the product of a factor for their place in a block, and one for the block.
constexpr uint64_t kBlockWords = 2048;
constexpr uint64_t kWordBytes = sizeof(uint32_t);

constexpr std::array<uint32_t, kBlockWords> word_factors() noexcept {
  std::array<uint32_t, kBlockWords> factors{};
  for (uint64_t i = 0; i < factors.size(); ++i) {
    factors[i] = static_cast<uint32_t>(spread((i + 1) * kStep) >> 32) | 1U;
  }
  return factors;
}
constexpr std::array<uint32_t, kBlockWords> kFactors = word_factors();

// Odd, so that no difference of a block becomes zero.
uint64_t block_factor(uint64_t seed, uint64_t block) noexcept {
  return mix(seed + block * kStep, 0) | 1U;
}

// Whole words of one block.
struct WordSum {
  const uint32_t* factors;
  const std::byte* words;
  uint64_t n;
  uint64_t* total;

  MODICUM_INLINE void operator()() const noexcept {
    const uint32_t* const by = factors;
    const std::byte* const from = words;
    const uint64_t count = n;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t word;
      std::memcpy(&word, from + i * kWordBytes, kWordBytes);
      sum += uint64_t{word} * by[i];
    }
    *total = sum;
  }
};

}  // namespace

uint64_t checksum_run(uint64_t seed, uint64_t at, std::span<const std::byte> bytes) noexcept {
  uint64_t sum = 0;
  while (!bytes.empty()) {
    const uint64_t word = at / kWordBytes, block = word / kBlockWords, skip = at % kWordBytes;
    const uint32_t* const factors = &kFactors[word % kBlockWords];
    uint64_t part = 0, n = 0;
    if (skip == 0 && bytes.size() >= kWordBytes) {
      const uint64_t left = (block + 1) * kBlockWords - word;
      const uint64_t words = std::min(left, bytes.size() / kWordBytes);
      run_widest(WordSum{factors, bytes.data(), words, &part});
      n = words * kWordBytes;
    } else {
      uint32_t value = 0;
      n = std::min<uint64_t>(kWordBytes - skip, bytes.size());
      std::memcpy(reinterpret_cast<std::byte*>(&value) + skip, bytes.data(), n);
      part = uint64_t{value} * *factors;
    }
    sum += block_factor(seed, block) * part;
    at += n;
    bytes = bytes.subspan(n);
  }
  return sum;
}

uint64_t name_hash(std::string_view name) noexcept { return XXH3_64bits(name.data(), name.size()); }

uint64_t digest_run(uint64_t seed, const std::byte* elements, int element_bytes, int64_t first,
                    int64_t n) noexcept {
  switch (element_bytes) {
    case 1: return sum<uint8_t>(seed, elements, first, n);
    case 2: return sum<uint16_t>(seed, elements, first, n);
    case 4: return sum<uint32_t>(seed, elements, first, n);
    case 8: return sum<uint64_t>(seed, elements, first, n);
    default: assert(!"an element of 1, 2, 4 or 8 bytes"); return 0;
  }
}

}  // namespace modicum
