// Ranks of a node collect the short runs of a save in shared memory, to write them together.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/io/io.h"
#include "modicum/memory/memory.h"
#include "modicum/ranks/board.h"

namespace modicum {

// Memory that the ranks of a node share. It has an equal part per rank; each rank commits its part
// and is charged for it.
//
//   part of a rank    | head | lists | slot | lists | slot |
//                             \_ half 0 ___/ \_ half 1 ___/
//
// A slot holds bytes; its lists, one of each rank, say which bytes that rank has put there.
class SharedGather {
 public:
  // `part_bytes` is memory per rank, a multiple of the page size. Throws IO if the kernel refuses.
  SharedGather(int ranks, uint64_t part_bytes);
  // Maps the memory that another process has made. nullopt if it can't be mapped, or if the address
  // leads to other memory, as it can in another container with the same process ids.
  static std::optional<SharedGather> open(const std::string& address, int ranks,
                                          uint64_t part_bytes);

  // For `open`: the memory's path, '#', and a random number that the memory holds. Only the process
  // that made the memory may call this function. The address is valid while this object lives.
  std::string address() const;
  uint64_t slot_bytes() const noexcept { return slot_bytes_; }

 private:
  friend class Gather;
  struct Head;
  struct Row;
  SharedGather(int ranks, uint64_t part_bytes, SharedPages pages);
  Head& head(int place) const noexcept;
  std::span<std::byte> half_of(int place, size_t half) const noexcept;
  // The list of the runs that the rank at place `from` has put into the slot of the rank at
  // `place`.
  std::span<Row> list_of(int place, size_t half, int from) const noexcept;
  std::byte* slot_of(int place, size_t half) const noexcept;

  const int ranks_;
  const uint64_t part_bytes_;
  uint64_t rows_ = 0;  // rows of a list
  uint64_t slot_bytes_ = 0;
  SharedPages pages_;
};

// One rank's endpoint. The ranks use one address space, for example the offsets in a file. It is
// cut into windows of a slot's size, which belong to the ranks in turn. A round is one window of
// each rank. All ranks put their bytes of a round into the slots of the windows' owners; then each
// rank writes its own slot to its window. Example with 2 ranks:
//
//   rank 0    put | meet | write window 0, put    | meet | write window 2, put | ...
//   rank 1    put | meet | write window 1, put    | meet | write window 3, put | ...
//   half      0            0 is written, 1 filled         1 is written, 0 filled
//
// When they meet, each rank announces the round of its next bytes. The earliest of these rounds is
// filled next; so rounds without bytes are skipped. Bytes may be put in any order; each is written
// once. If all ranks put their bytes in about the same order, a window's bytes are written
// together.
//
// Used by one thread at a time. Calls throw PEER if a rank fails meanwhile; after that, the
// SharedGather must not be used again.
class Gather {
 public:
  // `rank` is this rank's number on the board, `place` its number among the ranks of the node.
  Gather(SharedGather& shared, Board& board, int rank, int place);

  // Commits this rank's part and charges it as staging while this object lives. Throws BUDGET or
  // NOMEM.
  void commit(Ledger& ledger);
  uint64_t slot_bytes() const noexcept { return shared_.slot_bytes(); }
  // Called with a stretch of neighbouring bytes of this rank's window, which the ranks have put
  // there: must write `bytes` at address `at`. A stretch never crosses a multiple of slot_bytes().
  using WriteOut = FunctionRef<void(uint64_t at, std::span<const std::byte> bytes)>;
  // Puts `bytes` at address `at`. May first wait for the other ranks and write this rank's window.
  void put(uint64_t at, std::span<const std::byte> bytes, WriteOut write);
  // Writes the remaining windows. Returns after all ranks have called it. Later calls of `put` may
  // use another address space.
  void finish(WriteOut write);

 private:
  bool note(uint64_t slot, uint32_t begin, uint32_t length) noexcept;
  void meet(uint64_t wanted, WriteOut write);
  void write_own(WriteOut write);
  size_t half() const noexcept { return step_ % 2; }

  SharedGather& shared_;
  Board& board_;
  const int rank_;
  const int place_;
  Charge charge_;
  uint32_t step_ = 0;            // meetings so far; the same on every rank
  uint64_t round_;               // the round that is being filled
  uint64_t last_ = 0;            // address of the last `put`
  uint64_t walk_ = 0;            // number of puts whose address was below the previous one's
  std::vector<uint32_t> noted_;  // by slot: rows in this rank's list
  struct Cursor {
    const SharedGather::Row* row = nullptr;
    const SharedGather::Row* end = nullptr;
    uint32_t run = 0;  // number of the next run in `row`
  };
  std::vector<Cursor> cursors_;  // by place: position in that rank's list, for write_own
};

}  // namespace modicum
