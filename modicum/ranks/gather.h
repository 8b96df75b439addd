// Bytes that the ranks of a node collect for each other's writes.
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

// Memory that the ranks of a node share, in equal parts; each rank commits its part and is charged
// for it.
//
//   part of a rank    | head | lists | slot | lists | slot |
//                             \_ half 0 ___/ \_ half 1 ___/
class SharedGather {
 public:
  // `part_bytes` per rank, a multiple of the page size. IO if the kernel refuses.
  SharedGather(int ranks, uint64_t part_bytes);
  // The memory that another process has made; nullopt if it can't be mapped.
  static std::optional<SharedGather> open(const std::string& path, int ranks, uint64_t part_bytes);

  std::string path() const { return pages_.path(); }  // of the maker only, while it lives
  uint64_t slot_bytes() const noexcept { return slot_bytes_; }

 private:
  friend class Gather;
  struct Head;
  struct Row;
  SharedGather(int ranks, uint64_t part_bytes, SharedPages pages);
  Head& head(int place) const noexcept;
  std::span<std::byte> half_of(int place, size_t half) const noexcept;
  // The list of what rank `from` has put into the slot of rank `place`.
  std::span<Row> list_of(int place, size_t half, int from) const noexcept;
  std::byte* slot_of(int place, size_t half) const noexcept;

  const int ranks_;
  const uint64_t part_bytes_;
  uint64_t rows_ = 0;  // of a list
  uint64_t slot_bytes_ = 0;
  SharedPages pages_;
};

// One rank's end. The ranks go through an address space on which they agree, cut into windows of a
// slot's size; each window has an owner, in turn, and a round is a window of each rank. All ranks
// put their bytes into the slots; then each writes its own one. Example, 2 ranks:
//
//   rank 0    put | meet | write window 0, put    | meet | write window 2, put | ...
//   rank 1    put | meet | write window 1, put    | meet | write window 3, put | ...
//   half      0            0 is written, 1 filled         1 is written, 0 filled
//
// When they meet, each rank tells the round of its next bytes, and the earliest one comes next; so
// rounds without bytes are skipped. The bytes may come in any order: each byte is written once. If
// all ranks put their bytes in about the same order, a window's bytes are written together.
//
// One thread at a time. PEER if a rank fails meanwhile; then the memory must not be used again.
class Gather {
 public:
  // `rank` on the board, `place` among the ranks of the node.
  Gather(SharedGather& shared, Board& board, int rank, int place);

  // Commits this rank's part and charges it as staging, for as long as this lives. BUDGET, NOMEM.
  void commit(Ledger& ledger);
  uint64_t slot_bytes() const noexcept { return shared_.slot_bytes(); }
  // Receives the bytes of a stretch of this rank's window, put by any ranks, from address `at` on.
  // Never across a multiple of slot_bytes().
  using WriteOut = FunctionRef<void(uint64_t at, std::span<const std::byte> bytes)>;
  void put(uint64_t at, std::span<const std::byte> bytes, WriteOut write);
  // Until all ranks have called it. The next `put` begins anew.
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
  uint64_t round_;               // that is filled
  uint64_t last_ = 0;            // address of the last `put`
  uint64_t walk_ = 0;            // times that the addresses have gone back
  std::vector<uint32_t> noted_;  // rows of this rank's list in each slot
  struct Cursor {
    const SharedGather::Row* row = nullptr;
    const SharedGather::Row* end = nullptr;
    uint32_t run = 0;  // of the row
  };
  std::vector<Cursor> cursors_;  // by rank, of write_own
};

}  // namespace modicum
