// The test double of the exchange seam: threads of one process, without a ring.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "modicum/ranks/exchange.h"

namespace modicum {

// State shared by the ends of one exchange. Must outlive them.
class ThreadHub {
 public:
  struct Call {
    int rank = 0;
    int root = 0;
    uint64_t bytes = 0;
  };

  // `commit` charges each rank `part_bytes`.
  ThreadHub(int ranks, uint64_t part_bytes) : ranks_(ranks), part_bytes_(part_bytes) {}
  std::vector<Call> calls() const;  // in order

 private:
  friend class ThreadExchange;
  // Waits until `ready()`, called with the lock held, is true. PEER if a rank fails meanwhile.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Board& board, Ready ready);

  const int ranks_;
  const uint64_t part_bytes_;
  mutable std::mutex mutex_;   // guards everything below
  uint64_t sent_ = 0;          // broadcasts begun by their roots
  int to_take_ = 0;            // receivers that lack the current broadcast
  std::vector<std::byte> on_;  // its bytes, copied: the root may return before all have read them
  std::vector<Call> calls_;
};

// One rank's end. A root returns when all others have copied its bytes.
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
