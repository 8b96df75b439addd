// Compares two tied tensors that are both stored, while a load reads them. Internal to `stream`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "modicum/plan/plan.h"

namespace modicum {

// For each tie of the plan, two sums of hashes of (place in the local buffer, loaded bits): one
// over the alias, one over its target. Equal elements have equal sums; different ones have equal
// sums only by a 64-bit hash collision. `add` is thread-safe.
class Ties {
 public:
  explicit Ties(const Plan& plan);
  explicit Ties(const Plan&&) = delete;
  // Adds loaded elements of a transfer, of which the first is element `at` of the local buffer.
  // Ignores padding and targets without a tie.
  void add(const Transfer& transfer, int64_t at, std::span<const std::byte> elements) noexcept;
  // Adds the elements that a finished transfer has written to `host`, its whole local buffer.
  void add(const Transfer& done, std::span<const std::byte> host) noexcept;
  // Throws MISMATCH, naming the first alias whose elements differ from its target's.
  void prove(int rank) const;

 private:
  struct Sums {
    std::atomic<uint64_t> alias{0}, target{0};
  };
  bool has(const Transfer& transfer) const noexcept;

  const Plan& plan_;
  std::unique_ptr<Sums[]> sums_;  // by tie
};

}  // namespace modicum
