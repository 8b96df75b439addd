// The test double of the exchange seam: between threads of one process, without a ring.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "modicum/ranks/exchange.h"

namespace modicum {

// What the ends of one exchange share. Outlives them.
class ThreadHub {
 public:
  struct Call {
    int rank = 0;
    int root = 0;
    uint64_t bytes = 0;
  };

  // Each rank that commits is charged `part_bytes`.
  ThreadHub(int ranks, uint64_t part_bytes) : ranks_(ranks), part_bytes_(part_bytes) {}
  std::vector<Call> calls() const;  // in the order in which they were made

 private:
  friend class ThreadExchange;
  // Waits, noticing failures, until `ready()` (called with the lock held) says so.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Board& board, Ready ready);

  const int ranks_;
  const uint64_t part_bytes_;
  mutable std::mutex mutex_;   // guards everything below
  uint64_t sent_ = 0;          // broadcasts that their root has begun
  int to_take_ = 0;            // ranks that have not taken the one that is on
  std::vector<std::byte> on_;  // a copy: its root may be gone before all have seen it
  std::vector<Call> calls_;
};

// One rank's end. A root returns when all others have taken its bytes.
class ThreadExchange final : public Exchange {
 public:
  ThreadExchange(ThreadHub& hub, Board& board, int rank) noexcept
      : hub_(hub), board_(board), rank_(rank) {}
  Charge commit(Ledger& ledger) override;
  using Exchange::broadcast;
  void broadcast(int root, std::span<std::byte> bytes, Part wanted) override;

 private:
  ThreadHub& hub_;
  Board& board_;
  const int rank_;
  uint64_t turn_ = 0;
};

}  // namespace modicum
