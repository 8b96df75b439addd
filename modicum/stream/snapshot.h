// Keeps the values of host memory for a background save while training steps overwrite the memory.
// Part of the public header of `stream`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"

namespace modicum {

// The values that memory had at `charge`. Copies a block of it only if a step is about to overwrite
// the block before the save has read it. The window has room for a fixed number of copies, in
// places of one block.
//
//   block    read by the save    before_overwrite
//   0        yes                 returns
//   1        no                  copies the block to a free place of the window, and returns
//   2        no, no place free   waits until the save has read this block or freed a place
//
// The save reads a copied block from the window and then frees its place. So the save never waits
// for a step, and a step waits at most until the save has read everything.
//
// Call order: cover, lay_out, expect, charge; then `read` by the save while steps call `keep` and
// before_overwrite, all on any thread; then end. The memory must stay mapped until `end`.
class Snapshot {
 public:
  static constexpr uint64_t kBlockBytes = 256 * kKiB;

  // `window_bytes`: the largest size of the window.
  explicit Snapshot(uint64_t window_bytes) : window_bytes_(window_bytes) {}
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Adds memory that the save will read from.
  void cover(std::span<const std::byte> memory);
  // Divides the covered memory into blocks. Call after the last `cover`.
  void lay_out();
  // The bytes that `charge` will charge.
  uint64_t bytes() const noexcept { return places_ * kBlockBytes + table_bytes(); }
  // `count` pieces of `size` bytes each; the next piece begins `step` bytes after the one before.
  struct Pieces {
    const std::byte* first = nullptr;
    uint64_t size = 0;
    int64_t step = 0;
    int64_t count = 1;
  };
  // Announces one read of these covered bytes. Each `read` needs one `expect`.
  void expect(const Pieces& pieces);
  // Charges the window and the tables, as Purpose::snapshot. A page of the window is committed only
  // when a copy needs it. Throws BUDGET or NOMEM.
  void charge(Ledger& ledger);

  // Copies to `to` the values that expected bytes had at `charge`, the pieces packed one after the
  // other. They must be covered.
  void read(const Pieces& pieces, std::byte* to);
  // Copies to the window the blocks of `memory` that the save has yet to read. Returns false if the
  // window has no room for some of them; does not wait for room.
  bool keep(std::span<const std::byte> memory);
  // Call before these bytes are overwritten. They need not be covered.
  void before_overwrite(std::span<const std::byte> memory);
  // Call when the save reads no more: ends all waits and releases the window.
  void end() noexcept;

  // The time during which at least one thread has waited in before_overwrite.
  int64_t waited_ns() const;
  uint64_t copied_bytes() const;

 private:
  struct Region {  // contiguous covered memory
    uintptr_t begin = 0, end = 0;
    size_t first_block = 0;  // index in blocks_
  };
  struct Block {
    uint64_t left = 0;   // bytes of expected reads still to come
    int32_t place = -1;  // of its copy in the window; -1: not copied
  };
  // A block, its memory, and the part of this memory that the caller passed.
  struct BlockPart {
    Block& block;
    std::span<const std::byte> whole, part;
  };
  uint64_t table_bytes() const noexcept {
    return round_up(blocks_.size() * sizeof(Block) + regions_.size() * sizeof(Region), kPageBytes);
  }
  void for_each_block(std::span<const std::byte> memory, FunctionRef<void(const BlockPart&)> fn);
  void for_each_piece(const Pieces& pieces, FunctionRef<void(const BlockPart&, int64_t piece)> fn);
  std::byte* place_of(const BlockPart& found) noexcept;
  bool keep(const BlockPart& found);
  void release(Block& block);

  const uint64_t window_bytes_;
  std::vector<std::span<const std::byte>> covered_;
  std::vector<Region> regions_;  // disjoint, ascending
  std::vector<Block> blocks_;
  size_t places_ = 0;  // in the window
  Charge tables_;
  Buffer window_;
  SteadyClock clock_;
  std::atomic<bool> is_over_ = false;
  mutable std::mutex mutex_;         // guards blocks_, tables_, window_ and the members below
  std::condition_variable changed_;  // a block was read completely, or `end` was called
  std::vector<int32_t> free_;        // free places of the window
  int waiting_ = 0;                  // threads that wait
  int64_t waiting_since_ns_ = 0, waited_ns_ = 0;
  uint64_t copied_bytes_ = 0;
};

}  // namespace modicum
