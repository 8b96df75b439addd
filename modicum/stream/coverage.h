// The proof that every element of every local buffer was written exactly once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "modicum/plan/plan.h"

namespace modicum {

// Adds finished transfers to a fingerprint per buffer: a write to place i adds x^i modulo
// Powers::kPrime, for one random point x per load. For a buffer of 6 elements:
//
//   transfers     places [0, 2)     [2, 5)              [5, 6)
//   fingerprint   x^0 + x^1    +    x^2 + x^3 + x^4  +  x^5      = 1 + x + ... + x^5: proven
//   a defect      x^0 + x^1    +    x^1 + x^2 + x^3  +  x^5      differs for nearly every x
//
// If the places are not exactly 0, 1, ..., n - 1, each once, the two sums are different polynomials
// of a degree below n. These agree at n - 1 points at most, so a defect goes unnoticed with a
// probability of at most n / 2^61 (2e-9 for 4 billion elements). A place outside the buffer is
// always an error. An alias that is compared with its target has no buffer; its fingerprint is over
// the places that its target has in a buffer. `tick` may be called by any thread.
class Coverage {
 public:
  // `point`: above 1 and below Powers::kPrime, independent of the plan.
  Coverage(const Plan& plan, int rank, uint64_t point = random_point());
  Coverage(const Plan&&, int, uint64_t = 0) = delete;
  void tick(const Transfer& done) noexcept;
  // Call after all transfers. Throws INTEGRITY, naming the first buffer with a write outside it or
  // a place that was not written exactly once.
  void prove() const;

  static uint64_t random_point();

 private:
  struct Places {
    uint64_t begin = 0, end = 0;
  };
  struct WrittenElements {
    std::atomic<uint64_t> count{0}, fingerprint{0};
    std::atomic<bool> outside{false};
  };
  Places expected(uint32_t buffer) const;

  const Plan& plan_;
  int rank_;
  Powers powers_;
  std::vector<Places> expected_;                // by buffer
  std::unique_ptr<WrittenElements[]> written_;  // by buffer
};

// The `got` of an error about elements that were not written exactly once each: "9 elements", or,
// if `count` is the expected number, "10 elements, some of them more than once".
std::string written_text(uint64_t count, uint64_t expected);

}  // namespace modicum
