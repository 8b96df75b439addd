// The random bits of stochastic rounding: a counter-based hash, so that an element's bits depend
// only on (seed, step, parameter, global index, row). Internal to `kernels`.
//
// The 64-bit hash below gives the keys of a block; lanes-inl.h derives the words of the block's
// elements in 32-bit lanes. Stored results depend on these bits, so they never change.
#pragma once

#include <cstdint>

namespace modicum {

// The keys of a block, from which the 32-bit words of its elements are computed: word[0] is a
// summand, word[1] an odd factor.
struct BlockKeys {
  uint32_t word[2] = {};
};

// 2^32 / golden ratio, odd: spreads neighbouring counters over the word.
inline constexpr uint32_t kCounterFactor = 0x9e3779b9U;

// The finalizer of SplitMix64.
inline uint64_t scrambled(uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// The increment of SplitMix64: 2^64 / golden ratio, odd.
inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15U;

// Nested hashes, so that exchanging two of the three values changes the result.
inline uint64_t stream_key(uint64_t seed, int64_t step, uint64_t parameter) noexcept {
  const uint64_t of_step = scrambled(scrambled(seed + kGoldenGamma) + static_cast<uint64_t>(step));
  return scrambled(of_step + parameter);
}

// `block` is ScaleBlocks::block_of(global index). The keys are output number `block` of SplitMix64,
// which adds its increment before each output: hence block + 1.
inline BlockKeys block_keys(uint64_t stream, int64_t block) noexcept {
  const uint64_t key = scrambled(stream + (static_cast<uint64_t>(block) + 1) * kGoldenGamma);
  return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32) | 1U}};
}

}  // namespace modicum
