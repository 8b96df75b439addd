// The proof that what is stored under two names is one tensor, made while both are read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "modicum/plan/plan.h"

namespace modicum {

// Of either side of each of the plan's ties a sum over (place in the local buffer, bits as loaded);
// equal elements give equal sums, different ones practically never. Any thread may add.
class Ties {
 public:
  explicit Ties(const Plan& plan);
  explicit Ties(const Plan&&) = delete;
  // Elements of a transfer as loaded, the first for place `at`. Padding, and targets that no tie
  // speaks of, are passed over.
  void add(const Transfer& of, int64_t at, std::span<const std::byte> elements) noexcept;
  // What a finished transfer has put into `host`, its whole local buffer.
  void add(const Transfer& done, std::span<const std::byte> host) noexcept;
  // MISMATCH naming the first alias whose elements are not those of its target.
  void prove(int rank) const;

 private:
  struct Sums {
    std::atomic<uint64_t> alias{0}, of{0};
  };
  bool speaks_of(const Transfer& transfer) const noexcept;

  const Plan& plan_;
  std::unique_ptr<Sums[]> sums_;  // by tie
};

}  // namespace modicum
