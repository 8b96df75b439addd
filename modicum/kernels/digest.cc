#include <cassert>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15U;  // odd; spreads adjacent places and seeds

// Hashes the place to a mask, xors the element's bits, and hashes again. Both hashes are
// bijections, so two different elements at one place never give the same number. The
// multiplications make it unlikely that changes of several (place, bits) pairs cancel in the sum.
MODICUM_INLINE uint64_t mix(uint64_t place, uint64_t bits) noexcept {
  uint64_t x = (place ^ (place >> 32)) * 0xd6e8feb86659fd93U;
  x ^= (x >> 32) ^ bits;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
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
