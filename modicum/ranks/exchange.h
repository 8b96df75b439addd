// The interface by which ranks send tensor bytes to each other.
#pragma once

#include <cstdint>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/ranks/board.h"

namespace modicum {

// One rank's endpoint for broadcasts within a group of ranks. Each rank has a place in it, from 0.
// Used by one thread at a time. All ranks of the group must make the same calls in the same order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Commits this rank's part of the transport's memory and charges it as staging. Throws BUDGET or
  // NOMEM.
  virtual Charge commit(Ledger& ledger) = 0;
  // A half-open range of indices into the bytes of a broadcast.
  struct Part {
    size_t begin = 0;
    size_t end = SIZE_MAX;
  };
  // Copies `bytes` from the rank at place `root` to all others. A receiver needs only the bytes in
  // `wanted`; the rest of its `bytes` is unspecified. Throws PEER if a rank fails meanwhile.
  virtual void broadcast(int root, std::span<std::byte> bytes, Part wanted) = 0;
  void broadcast(int root, std::span<std::byte> bytes) { broadcast(root, bytes, Part{}); }
};

// A ring of four slots in shared memory, for ranks on one machine. Must be constructed before the
// ranks are forked. Each rank commits an equal part and is charged for it.
//
//   turn         0       1       2       3       4 = slot 0 again
//   root       fill -> fill -> fill -> fill -> waits until all readers have taken turn 0
//   readers    copy ..... copy ..... copy .....
//
// A turn is one use of a slot: the root fills it, the readers copy it. A tensor larger than a slot
// takes several turns. `filled` counts the turns that the roots have filled. `taken[slot]` counts
// the readers that have copied the slot's latest turn.
class SharedRing {
 public:
  // `part_bytes` is memory per rank, a multiple of the page size.
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
  // `rank` is this rank's number on the board, `place` its number among the ranks of this ring.
  RingExchange(SharedRing& ring, Board& board, int rank, int place) noexcept
      : ring_(ring), board_(board), rank_(rank), place_(place) {}
  Charge commit(Ledger& ledger) override;
  using Exchange::broadcast;
  void broadcast(int root, std::span<std::byte> bytes, Part wanted) override;

 private:
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> bytes, Part wanted);

  SharedRing& ring_;
  Board& board_;
  const int rank_;
  const int place_;
  uint32_t turn_ = 0;  // turns completed; the same on every rank between calls
};

}  // namespace modicum
