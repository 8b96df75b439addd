// The test double of Exchange: ranks are threads of one process; there is no ring.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "modicum/ranks/exchange.h"

namespace modicum {

// State shared by the endpoints of one exchange. Must outlive them.
class ThreadHub {
 public:
  struct Call {
    int rank = 0;
    int root = 0;
    uint64_t bytes = 0;
  };

  // ThreadExchange::commit charges each rank `part_bytes`.
  ThreadHub(int ranks, uint64_t part_bytes) : ranks_(ranks), part_bytes_(part_bytes) {}
  std::vector<Call> calls() const;  // the broadcasts of all ranks, in the order of their calls

 private:
  friend class ThreadExchange;
  // Waits until `ready()`, called with the lock held, returns true. Throws PEER if a rank fails
  // meanwhile.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Board& board, Ready ready);

  const int ranks_;
  const uint64_t part_bytes_;
  mutable std::mutex mutex_;           // guards everything below
  uint64_t sent_ = 0;                  // broadcasts begun by their roots
  int to_take_ = 0;                    // receivers that have yet to copy the current broadcast
  std::vector<std::byte> sent_bytes_;  // a copy, since a root whose wait fails may free its bytes
  std::vector<Call> calls_;
};

// One rank's endpoint. A root returns when all others have copied its bytes.
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
  uint64_t turn_ = 0;  // broadcasts that this rank has begun
};

}  // namespace modicum
