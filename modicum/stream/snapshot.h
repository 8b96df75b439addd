// The host memory that a save in the background has yet to read, while steps overwrite it. Part of
// the door of `stream`.
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

// The values of memory at one time. It is no copy: a block is copied only if it would be
// overwritten before the save has read it, and there are never more copies than the window has
// places for.
//
//   block    read by the save    before_overwrite
//   0        yes                 returns
//   1        no                  copies it to a free place of the window, and returns
//   2        no, no place left   waits until the save has read it, or a block that has a place
//
// The save reads a copied block from the window, whose place is then free again. So the save never
// waits for a step, and a step waits for no longer than the save reads.
//
// Life: cover; lay_out; expect; charge; then read by the save, on any thread, and before_overwrite,
// on any thread; then end. The memory must stay mapped until `end`.
class Snapshot {
 public:
  static constexpr uint64_t kBlockBytes = 256 * kKiB;

  // `window_bytes`: the most that the window takes.
  explicit Snapshot(uint64_t window_bytes) : window_bytes_(window_bytes) {}
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // The save will read from `memory`.
  void cover(std::span<const std::byte> memory);
  // After the last `cover`.
  void lay_out();
  // What `charge` charges.
  uint64_t bytes() const noexcept { return places_ * kBlockBytes + table_bytes(); }
  // `count` pieces of `size` bytes, `step` bytes apart, each aligned to its size or `size` apart.
  struct Pieces {
    const std::byte* first = nullptr;
    uint64_t size = 0;
    int64_t step = 0;
    int64_t count = 1;
  };
  // The save will read these covered bytes, once for each call.
  void expect(const Pieces& pieces);
  // Charges the window and the tables, as Purpose::snapshot. Copies commit the window's pages: if
  // no step meets a block that is not read, it takes no memory and no time. BUDGET, NOMEM.
  void charge(Ledger& ledger);

  // Copies expected bytes, with the values that they had at `charge`, to `to`, one after the other.
  void read(const Pieces& pieces, std::byte* to);
  // Copies the expected part of `memory`; false if the window has no room for all. Never waits.
  bool keep(std::span<const std::byte> memory);
  // Call before these bytes are overwritten; others may be among them.
  void before_overwrite(std::span<const std::byte> memory);
  // Nothing more is read: waits end. Gives the window back.
  void end() noexcept;

  // The time during which at least one thread has waited in before_overwrite.
  int64_t waited_ns() const;
  uint64_t copied_bytes() const;

 private:
  struct Region {
    uintptr_t begin = 0, end = 0;
    size_t first_block = 0;
  };
  struct Block {
    uint64_t left = 0;   // bytes to be read
    int32_t place = -1;  // in the window; -1: the values are in the memory itself
  };
  // A block, and a part of it.
  struct Found {
    Block& block;
    std::span<const std::byte> whole, part;
  };
  uint64_t table_bytes() const noexcept {
    return round_up(blocks_.size() * sizeof(Block) + regions_.size() * sizeof(Region), kPageBytes);
  }
  void for_each_block(std::span<const std::byte> memory, FunctionRef<void(const Found&)> fn);
  void for_each_piece(const Pieces& pieces, FunctionRef<void(const Found&, int64_t piece)> fn);
  std::byte* place_of(const Found& of) noexcept;
  bool keep(const Found& of);
  void release(Block& block);

  const uint64_t window_bytes_;
  std::vector<std::span<const std::byte>> covered_;
  std::vector<Region> regions_;  // disjoint, ascending
  std::vector<Block> blocks_;
  size_t places_ = 0;
  Charge tables_;
  Buffer window_;
  SteadyClock clock_;
  std::atomic<bool> is_over_ = false;
  mutable std::mutex mutex_;  // of the blocks, and of what follows
  std::condition_variable changed_;
  std::vector<int32_t> free_;  // places
  int waiting_ = 0;
  int64_t waiting_since_ns_ = 0, waited_ns_ = 0;
  uint64_t copied_bytes_ = 0;
};

}  // namespace modicum
