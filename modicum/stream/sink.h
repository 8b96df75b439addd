// The interface to the memory of a rank's local buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/plan/plan.h"

namespace modicum {

// Several threads may use a sink at the same time, but during a load never for the same element.
class Sink {
 public:
  virtual ~Sink() = default;
  // The rank that holds these buffers; nullopt if the sink does not know it. Loads, saves and
  // checks of another rank throw USAGE (checked_rank).
  virtual std::optional<int> rank() const noexcept { return std::nullopt; }
  // Host memory of local buffer `buffer`, padding included; empty if the buffer must be accessed by
  // `copy` and `fetch`. May throw USAGE if the plan has no such buffer.
  virtual std::span<std::byte> host(uint32_t buffer) = 0;
  // Copies contiguous elements from staging to local buffer `buffer`, from its element `at` on.
  virtual void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) = 0;
  // The reverse, for a save: copies elements out of a buffer that has no host memory.
  virtual void fetch(uint32_t buffer, int64_t at, std::span<std::byte> elements) = 0;
};

// Returns `rank`. Throws USAGE unless it is a rank of the plan, and `sink` is of this rank.
int checked_rank(int rank, const Plan& plan, const Sink& sink);

// Shards in host memory. Buffers with Destination::cpu are in one mapping (the arena), charged as
// `shards` and mapped at construction; the load is the first to write to its pages. Buffers with
// Destination::caller_memory are the caller's.
class HostSink final : public Sink {
 public:
  using CallerMemory = std::vector<std::span<std::byte>>;
  using Copy = std::function<void(uint32_t buffer, int64_t at, std::span<const std::byte>)>;
  // caller_memory[b] is the memory of buffer b, used if its destination is caller_memory. `copy`
  // receives the elements of buffers with Destination::copy, on any thread. Throws USAGE, naming
  // the tensor, if the caller's memory has another size than its buffer; BUDGET, NOMEM.
  HostSink(const Plan& plan, int rank, Ledger& ledger, CallerMemory caller_memory = {},
           Copy copy = {});
  HostSink(const Plan&&, int, Ledger&, CallerMemory = {}, Copy = {}) = delete;
  std::optional<int> rank() const noexcept override { return rank_; }
  std::span<std::byte> host(uint32_t buffer) override;  // throws USAGE: see buffer_count
  void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) override;
  // Always throws UNSUPPORTED: elements that were passed to a callback can't be read back.
  void fetch(uint32_t buffer, int64_t at, std::span<std::byte> elements) override;
  // Fills all host memory of the buffers with a pattern (0xa5 in every byte), so that a check
  // notices elements that were never written. Calls `poll` before every 16 MiB; it may throw.
  void poison(Poll poll = kNoPoll);
  // Moves the arena out; buffer b begins at arena_begins(plan, rank)[b].
  Buffer release() noexcept { return std::move(arena_); }

 private:
  const Plan& plan_;
  int rank_ = 0;
  Buffer arena_;
  std::vector<uint64_t> begins_;  // by buffer: offset in arena_; the last is the arena's size
  const CallerMemory caller_memory_;
  const Copy copy_;
};

// One rank's part of the model's digest: covers the elements for which the rank is the primary
// replica. The sum over all ranks, modulo 2^64, is the digest, which does not depend on the layout.
class DigestSum {
 public:
  DigestSum(const Plan& plan, int rank);
  DigestSum(const Plan&&, int) = delete;
  // Adds elements [at, at + n) of a local buffer, in the target's dtype. Thread-safe. Each element
  // must be added once.
  void add(uint32_t buffer, int64_t at, std::span<const std::byte> elements);
  uint64_t value() const noexcept { return sum_.load(std::memory_order_relaxed); }

 private:
  const Plan& plan_;
  const int rank_;
  std::vector<uint64_t> seeds_;                             // by target
  std::vector<std::pair<uint32_t, uint64_t>> alias_seeds_;  // for each alias: its target, its seed
  std::atomic<uint64_t> sum_{0};
};

}  // namespace modicum
