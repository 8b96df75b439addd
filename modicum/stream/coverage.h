// The proof that every element of every local buffer was written exactly once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "modicum/plan/plan.h"

namespace modicum {

// Ticks off finished transfers. Of the places ticked in a buffer it keeps how many they were, their
// sum and the sum of their squares, modulo 2^64; at the end all three must be those of 0, 1, ...,
// padded_numel - 1. A transfer that is dropped, doubled or shifted changes at least one of them.
// Any thread may tick.
class Coverage {
 public:
  explicit Coverage(const Plan& plan);
  void tick(const Transfer& done) noexcept;
  // INTEGRITY naming the first buffer whose places don't come out.
  void prove(int rank) const;

 private:
  struct Sums {
    std::atomic<uint64_t> count{0}, places{0}, squares{0};
  };
  const Plan& plan_;
  std::unique_ptr<Sums[]> sums_;  // by buffer
};

// Of 0, 1, ..., n - 1 and of their squares, modulo 2^64.
uint64_t sum_below(uint64_t n) noexcept;
uint64_t sum_of_squares_below(uint64_t n) noexcept;

}  // namespace modicum
