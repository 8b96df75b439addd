#include "modicum/stream/snapshot.h"

#include <algorithm>
#include <cstring>

namespace modicum {
namespace {

uintptr_t address(const std::byte* at) noexcept { return reinterpret_cast<uintptr_t>(at); }

const std::byte* memory_at(uintptr_t at) noexcept {
  return reinterpret_cast<const std::byte*>(at);  // NOLINT(performance-no-int-to-ptr)
}

// The number of blocks that a region touches. Blocks begin at multiples of kBlockBytes.
size_t blocks_between(uintptr_t begin, uintptr_t end) noexcept {
  return (end - 1) / Snapshot::kBlockBytes - begin / Snapshot::kBlockBytes + 1;
}

}  // namespace

void Snapshot::cover(std::span<const std::byte> memory) {
  if (!memory.empty()) covered_.push_back(memory);
}

void Snapshot::lay_out() {
  std::sort(covered_.begin(), covered_.end(),
            [](const auto& a, const auto& b) { return address(a.data()) < address(b.data()); });
  for (const std::span<const std::byte> memory : covered_) {
    const uintptr_t begin = address(memory.data()), end = begin + memory.size();
    if (regions_.empty() || begin > regions_.back().end) {
      regions_.push_back({begin, end});
    } else {
      regions_.back().end = std::max(regions_.back().end, end);
    }
  }
  covered_ = {};
  size_t blocks = 0;
  for (Region& region : regions_) {
    region.first_block = blocks;
    blocks += blocks_between(region.begin, region.end);
  }
  blocks_.resize(blocks);
  places_ = std::min<size_t>(window_bytes_ / kBlockBytes, blocks);
}

void Snapshot::expect(const Pieces& pieces) {
  for_each_piece(pieces,
                 [](const BlockPart& found, int64_t) { found.block.left += found.part.size(); });
}

void Snapshot::charge(Ledger& ledger) {
  tables_ = ledger.adopt(Purpose::snapshot, table_bytes());
  window_ = ledger.reserve(Purpose::snapshot, places_ * kBlockBytes);
  for (size_t place = places_; place > 0; --place) {
    free_.push_back(static_cast<int32_t>(place - 1));
  }
}

void Snapshot::for_each_block(std::span<const std::byte> memory,
                              FunctionRef<void(const BlockPart&)> fn) {
  const uintptr_t begin = address(memory.data()), end = begin + memory.size();
  auto region =
      std::upper_bound(regions_.begin(), regions_.end(), begin,
                       [](uintptr_t at, const Region& candidate) { return at < candidate.end; });
  for (; region != regions_.end() && region->begin < end; ++region) {
    const uintptr_t last = std::min(end, region->end);
    for (uintptr_t at = std::max(begin, region->begin); at < last;) {
      const uintptr_t index = at / kBlockBytes;
      const uintptr_t from = std::max(region->begin, index * kBlockBytes);
      const uintptr_t to = std::min(region->end, (index + 1) * kBlockBytes);
      const uintptr_t part_end = std::min(last, to);
      Block& block = blocks_[region->first_block + index - region->begin / kBlockBytes];
      fn({block, {memory_at(from), to - from}, {memory_at(at), part_end - at}});
      at = part_end;
    }
  }
}

void Snapshot::for_each_piece(const Pieces& pieces,
                              FunctionRef<void(const BlockPart&, int64_t piece)> fn) {
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    for_each_block({pieces.first + piece * pieces.step, pieces.size},
                   [&](const BlockPart& found) { fn(found, piece); });
  }
}

// The address of the part's copy in the window.
std::byte* Snapshot::place_of(const BlockPart& found) noexcept {
  return window_.bytes().data() + static_cast<uint64_t>(found.block.place) * kBlockBytes +
         (found.part.data() - found.whole.data());
}

void Snapshot::read(const Pieces& pieces, std::byte* to) {
  for_each_piece(pieces, [&](const BlockPart& found, int64_t piece) {
    const std::byte* const begin = pieces.first + piece * pieces.step;
    std::byte* const place = to + static_cast<uint64_t>(piece) * pieces.size;
    // Under the lock no step passes before_overwrite for a block that is still being read.
    const std::lock_guard lock(mutex_);
    const std::byte* const from = found.block.place < 0 ? found.part.data() : place_of(found);
    std::memcpy(place + (found.part.data() - begin), from, found.part.size());
    MODICUM_ASSERT(found.block.left >= found.part.size());
    found.block.left -= found.part.size();
    if (found.block.left == 0) release(found.block);
  });
}

// Frees the place of a block that was read completely. Call with the lock.
void Snapshot::release(Block& block) {
  if (block.place >= 0) free_.push_back(block.place);
  block.place = -1;
  if (waiting_ > 0) changed_.notify_all();
}

// Copies the block if the save has yet to read it. Returns whether the block may be overwritten
// now. Call with the lock.
bool Snapshot::keep(const BlockPart& found) {
  if (found.block.left == 0 || found.block.place >= 0) return true;
  if (free_.empty()) return false;
  found.block.place = free_.back();
  free_.pop_back();
  std::memcpy(place_of({found.block, found.whole, found.whole}), found.whole.data(),
              found.whole.size());
  copied_bytes_ += found.whole.size();
  return true;
}

bool Snapshot::keep(std::span<const std::byte> memory) {
  bool all = true;
  for_each_block(memory, [&](const BlockPart& found) {
    const std::lock_guard lock(mutex_);
    all = keep(found) && all;
  });
  return all;
}

void Snapshot::before_overwrite(std::span<const std::byte> memory) {
  if (is_over_.load(std::memory_order_acquire)) return;
  for_each_block(memory, [&](const BlockPart& found) {
    std::unique_lock lock(mutex_);
    if (keep(found)) return;
    if (waiting_++ == 0) waiting_since_ns_ = clock_.now_ns();
    while (!keep(found)) changed_.wait(lock);
    if (--waiting_ == 0) waited_ns_ += clock_.now_ns() - waiting_since_ns_;
  });
}

void Snapshot::end() noexcept {
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) block = {};
  free_.clear();
  window_ = {};
  tables_ = {};
  is_over_.store(true, std::memory_order_release);
  changed_.notify_all();
}

int64_t Snapshot::waited_ns() const {
  const std::lock_guard lock(mutex_);
  return waited_ns_;
}

uint64_t Snapshot::copied_bytes() const {
  const std::lock_guard lock(mutex_);
  return copied_bytes_;
}

}  // namespace modicum
