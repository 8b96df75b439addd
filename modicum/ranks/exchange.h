// The seam between ranks for bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/ranks/board.h"

namespace modicum {

// One rank's end. One thread at a time; every rank makes the same calls in the same order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Takes what this rank's part of the transport holds, and books it as staging.
  virtual Charge commit(Ledger& ledger) = 0;
  // On `root` (its place among the ranks that exchange), `bytes` goes out; on all others it comes
  // in, what is not wanted of it perhaps not. PEER where a rank has failed meanwhile.
  struct Part {
    size_t begin = 0;
    size_t end = SIZE_MAX;
  };
  virtual void broadcast(int root, std::span<std::byte> bytes, Part wanted) = 0;
  void broadcast(int root, std::span<std::byte> bytes) { broadcast(root, bytes, Part{}); }
};

// A ring in shared memory, for ranks on one machine: the root fills slots, every other rank copies
// them out, a slot is free again when all have. Made before the ranks are forked; each rank commits
// and is charged an equal part of it.
class SharedRing {
 public:
  // `part_bytes` per rank, whole pages.
  SharedRing(int ranks, uint64_t part_bytes);

 private:
  friend class RingExchange;
  struct Control;
  Control& control() const noexcept;

  const int ranks_;
  const uint64_t part_bytes_;
  const uint64_t slot_bytes_;
  Mapping control_;
  Mapping data_;
};

class RingExchange final : public Exchange {
 public:
  // `place` of the ring's ranks, `rank` on the board.
  RingExchange(SharedRing& ring, Board& board, int rank, int place) noexcept
      : ring_(ring), board_(board), rank_(rank), place_(place) {}
  Charge commit(Ledger& ledger) override;
  using Exchange::broadcast;
  void broadcast(int root, std::span<std::byte> bytes, Part wanted) override;

 private:
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> bytes, Part wanted);
  template <typename IsReady>
  void wait_until(const std::atomic<uint32_t>& counter, const IsReady& is_ready);

  SharedRing& ring_;
  Board& board_;
  const int rank_;
  const int place_;
  uint32_t turn_ = 0;  // slots that have passed, on every rank the same
};

}  // namespace modicum
