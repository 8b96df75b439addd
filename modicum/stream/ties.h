// Compares tied tensors that are stored under both names, while both are read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "modicum/plan/plan.h"

namespace modicum {

// For each tie of the plan, a hash sum over (place in the local buffer, bits as loaded) of either
// side. Equal elements give equal sums, different ones practically never. Any thread may add.
class Ties {
 public:
  explicit Ties(const Plan& plan);
  explicit Ties(const Plan&&) = delete;
  // Adds loaded elements of a transfer, for places `at` and following. Ignores padding and targets
  // without a tie.
  void add(const Transfer& of, int64_t at, std::span<const std::byte> elements) noexcept;
  // Adds the elements that a finished transfer has written to `host`, its whole local buffer.
  void add(const Transfer& done, std::span<const std::byte> host) noexcept;
  // MISMATCH, naming the first alias whose elements differ from its target's.
  void prove(int rank) const;

 private:
  struct Sums {
    std::atomic<uint64_t> alias{0}, of{0};
  };
  bool has(const Transfer& transfer) const noexcept;

  const Plan& plan_;
  std::unique_ptr<Sums[]> sums_;  // by tie
};

}  // namespace modicum
