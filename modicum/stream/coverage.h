// The proof that every element of every local buffer was written exactly once.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "modicum/plan/plan.h"

namespace modicum {

// The powers of a point x in the field of the integers modulo p = 2^61 - 1, by table: sixteen
// multiplications for an exponent of any size. Immutable; any thread may read.
class Powers {
 public:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  explicit Powers(uint64_t x) noexcept;  // 1 < x < kPrime
  uint64_t power(uint64_t exponent) const noexcept;
  // x^at + x^(at + stride) + ... + x^(at + (n - 1) stride). A negative stride counts down.
  uint64_t sum(uint64_t at, int64_t stride, uint64_t n) const noexcept;

 private:
  std::array<std::array<uint64_t, 16>, 16> table_;  // [i][d] = x^(d 16^i)
  uint64_t inverse_;                                // of x - 1: contiguous runs need no other
};

// Ticks off finished transfers. The places written in a buffer are the exponents of a polynomial:
// each write of place i adds x^i, at one random point x per load, modulo the prime 2^61 - 1. The
// proof compares the value with that of 1 + x + ... + x^(n - 1). Where the places are not exactly
// 0, 1, ..., n - 1, each once, the two are different polynomials of a degree below n: they agree at
// no more than n - 1 of the points, so that a wrong is missed with a probability of at most
// n / 2^61 (2e-9 for 4 billion elements), whatever the wrong is. Places outside of the buffer are
// an error of their own. A compared alias has the places that its target has in its buffer.
// `tick` may be called by any thread.
class Coverage {
 public:
  // `point`: a number above 1 and below Powers::kPrime, which nothing in the plan may depend on.
  Coverage(const Plan& plan, int rank, uint64_t point = random_point());
  Coverage(const Plan&&, int, uint64_t = 0) = delete;
  void tick(const Transfer& done) noexcept;
  // INTEGRITY naming the first buffer whose places are not all written exactly once.
  void prove() const;

  static uint64_t random_point();

 private:
  struct Places {
    uint64_t begin = 0, end = 0;
  };
  struct Written {
    std::atomic<uint64_t> count{0}, fingerprint{0};
    std::atomic<bool> outside{false};
  };
  Places expected(uint32_t buffer) const;

  const Plan& plan_;
  int rank_;
  Powers powers_;
  std::vector<Places> expected_;        // by buffer
  std::unique_ptr<Written[]> written_;  // by buffer
};

}  // namespace modicum
