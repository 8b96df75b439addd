// Fingerprints of multisets of element indices: the sum of x^index for a point x. Equal multisets
// have equal fingerprints, and different multisets practically always have different ones. So a
// fingerprint shows whether strided runs cover a range exactly once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace modicum {

// The powers of a point x in the field of integers modulo the prime p = 2^61 - 1. With a table, any
// exponent takes at most sixteen multiplications. Immutable; any thread may read.
class Powers {
 public:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  explicit Powers(uint64_t x) noexcept;  // 1 < x < kPrime
  uint64_t power(uint64_t exponent) const noexcept;
  // x^at + x^(at + stride) + ... + x^(at + (n - 1) stride); `stride` may be negative.
  uint64_t sum(uint64_t at, int64_t stride, uint64_t n) const noexcept;
  // The sum of x^(at + i inner.step + k outer.step) over i < inner.n, k < outer.n.
  struct Series {
    int64_t step = 1;
    uint64_t n = 0;
  };
  uint64_t sum(uint64_t at, const Series& inner, const Series& outer) const noexcept;
  static uint64_t add(uint64_t a, uint64_t b) noexcept;  // modulo kPrime

 private:
  std::array<std::array<uint64_t, 16>, 16> table_;  // [i][d] = x^(d 16^i)
  uint64_t inverse_;                                // inverse of x - 1, for sums with stride 1
};

}  // namespace modicum
