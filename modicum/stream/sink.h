// The seam where elements of a rank's local buffers go.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"

namespace modicum {

// Thread rules: several threads, never for the same element.
class Sink {
 public:
  virtual ~Sink() = default;
  // Host memory of local buffer `buffer`, padding included, to be written straight into; empty
  // where only copies are taken.
  virtual std::span<std::byte> host(uint32_t buffer) noexcept = 0;
  // Elements for place `at` and on of local buffer `buffer`, from staging.
  virtual void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) = 0;
};

// The shards in host memory: one arena of `shards`, booked and mapped when it is made, whose pages
// come as a load fills them; and what the caller has given, by target.
class HostSink final : public Sink {
 public:
  using Given = std::vector<std::span<std::byte>>;
  using Copy = std::function<void(uint32_t buffer, int64_t at, std::span<const std::byte>)>;
  // `given` has the memory of each target whose destination that is (USAGE where its size is
  // wrong), `copy` takes the elements of those that are copied; any thread.
  HostSink(const Plan& plan, int rank, Ledger& ledger, Given given = {}, Copy copy = {});
  HostSink(const Plan&&, int, Ledger&, Given = {}, Copy = {}) = delete;
  std::span<std::byte> host(uint32_t buffer) noexcept override;
  void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) override;
  // Fills everything with a pattern that no load leaves behind.
  void poison(Poll poll = kNoPoll);
  // The arena, for who wants to keep it longer; buffer b begins at arena_begins(plan, rank)[b].
  Buffer release() noexcept { return std::move(arena_); }

 private:
  const Plan& plan_;
  int rank_ = 0;
  Buffer arena_;
  std::vector<uint64_t> begins_;  // of each buffer, and the end
  const Given given_;
  const Copy copy_;
};

// The part of the model's digest that one rank's primary elements make; see `digest_seed`. The sum
// over all ranks, modulo 2^64, is the digest, whatever the layout.
class DigestSum {
 public:
  DigestSum(const Plan& plan, int rank);
  DigestSum(const Plan&&, int) = delete;
  // Elements [at, at + n) of a local buffer, in the target's dtype. Any thread, each element once.
  void add(uint32_t buffer, int64_t at, std::span<const std::byte> elements) noexcept;
  uint64_t value() const noexcept { return sum_.load(std::memory_order_relaxed); }

 private:
  const Plan& plan_;
  const int rank_;
  std::vector<uint64_t> seeds_;                             // of each target
  std::vector<std::pair<uint32_t, uint64_t>> alias_seeds_;  // target, seed of its second name
  std::atomic<uint64_t> sum_{0};
};

}  // namespace modicum
