#include "modicum/ranks/gather.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "modicum/ranks/counters.h"

namespace modicum {
namespace {

constexpr uint64_t kMaxRows = 32;       // of a list
constexpr uint64_t kNone = UINT64_MAX;  // no round
// A round is `walk << kWalkBit | number`, where `walk` is how often the addresses have gone back.
// If `walk` overflows, rounds of some ranks come too early, and bytes are written in more calls.
constexpr unsigned kWalkBit = 44;

}  // namespace

struct alignas(64) SharedGather::Head {
  // Arrivals of all ranks at all meetings; only used in part 0. It wraps around, so only
  // differences are compared.
  std::atomic<uint32_t> arrived{0};
  std::array<std::atomic<uint64_t>, 2> next{0, 0};  // by half: the round that this rank wants next
  Digest token;                                     // random; only used in part 0
};

// `count` runs of `length` bytes, whose begins are `stride` apart. A row of `count` 0 ends a list.
struct SharedGather::Row {
  uint32_t begin, length, stride, count;
};

SharedGather::SharedGather(int ranks, uint64_t part_bytes)
    : SharedGather(ranks, part_bytes,
                   SharedPages::make(saturating_mul(part_bytes, static_cast<uint64_t>(ranks)))) {
  std::random_device device;
  std::uniform_int_distribution<uint64_t> bits;
  head(0).token = {bits(device), bits(device)};
}

SharedGather::SharedGather(int ranks, uint64_t part_bytes, SharedPages pages)
    : ranks_(ranks), part_bytes_(part_bytes), pages_(std::move(pages)) {
  MODICUM_ASSERT(part_bytes % kPageBytes == 0);
  const uint64_t half = (part_bytes - sizeof(Head)) / 2;
  const uint64_t row = saturating_mul(sizeof(Row), static_cast<uint64_t>(ranks));
  rows_ = std::clamp(half / 8 / row, uint64_t{1}, kMaxRows);  // lists take about 1/8 of a half
  MODICUM_ASSERT(rows_ * row + kPageBytes <= half);           // the plan has no smaller part
  // A Row has 32 bits for a place in a slot.
  slot_bytes_ = std::min<uint64_t>(half - rows_ * row, UINT32_MAX) / kPageBytes * kPageBytes;
}

std::optional<SharedGather> SharedGather::open(const std::string& address, int ranks,
                                               uint64_t part_bytes) {
  const size_t end = address.rfind('#');
  if (end == std::string::npos) return std::nullopt;
  auto pages = SharedPages::open(address.substr(0, end),
                                 saturating_mul(part_bytes, static_cast<uint64_t>(ranks)));
  if (!pages) return std::nullopt;
  SharedGather opened(ranks, part_bytes, std::move(*pages));
  if (opened.head(0).token.hex() != address.substr(end + 1)) return std::nullopt;
  return opened;
}

std::string SharedGather::address() const { return pages_.path() + "#" + head(0).token.hex(); }

SharedGather::Head& SharedGather::head(int place) const noexcept {
  return *reinterpret_cast<Head*>(pages_.bytes().data() +
                                  part_bytes_ * static_cast<uint64_t>(place));
}

std::span<std::byte> SharedGather::half_of(int place, size_t half) const noexcept {
  const uint64_t bytes = (part_bytes_ - sizeof(Head)) / 2 / sizeof(Row) * sizeof(Row);
  const uint64_t begin = part_bytes_ * static_cast<uint64_t>(place) + sizeof(Head) + bytes * half;
  return pages_.bytes().subspan(begin, bytes);
}

std::span<SharedGather::Row> SharedGather::list_of(int place, size_t half,
                                                   int from) const noexcept {
  auto* const rows = reinterpret_cast<Row*>(half_of(place, half).data());
  return {rows + rows_ * static_cast<uint64_t>(from), rows_};
}

std::byte* SharedGather::slot_of(int place, size_t half) const noexcept {
  return half_of(place, half).data() + rows_ * sizeof(Row) * static_cast<uint64_t>(ranks_);
}

Gather::Gather(SharedGather& shared, Board& board, int rank, int place)
    : shared_(shared),
      board_(board),
      rank_(rank),
      place_(place),
      round_(kNone),
      noted_(static_cast<size_t>(shared.ranks_)),
      cursors_(static_cast<size_t>(shared.ranks_)) {}

void Gather::commit(Ledger& ledger) {
  const uint64_t begin = shared_.part_bytes_ * static_cast<uint64_t>(place_);
  charge_ = ledger.charge_shared(Purpose::staging,
                                 shared_.pages_.bytes().subspan(begin, shared_.part_bytes_));
}

void Gather::put(uint64_t at, std::span<const std::byte> bytes, WriteOut write) {
  if (at < last_) ++walk_;
  last_ = at;
  const auto ranks = static_cast<uint64_t>(shared_.ranks_);
  while (!bytes.empty()) {
    const uint64_t window = at / slot_bytes(), begin = at % slot_bytes();
    const uint64_t n = std::min<uint64_t>(bytes.size(), slot_bytes() - begin);
    const uint64_t round = walk_ << kWalkBit | window / ranks;
    const uint64_t slot = window % ranks;
    // If the list is full, the ranks meet, and the same round is filled again.
    while (round_ != round || !note(slot, static_cast<uint32_t>(begin), static_cast<uint32_t>(n))) {
      meet(round, write);
    }
    std::memcpy(shared_.slot_of(static_cast<int>(slot), half()) + begin, bytes.data(), n);
    at += n;
    bytes = bytes.subspan(n);
  }
}

void Gather::finish(WriteOut write) {
  do {  // until no rank wants a further round
    meet(kNone, write);
  } while (round_ != kNone);
  last_ = walk_ = 0;
}

// Adds a run to this rank's list for a slot. False if the list is full.
bool Gather::note(uint64_t slot, uint32_t begin, uint32_t length) noexcept {
  const auto list = shared_.list_of(static_cast<int>(slot), half(), place_);
  uint32_t& rows = noted_[slot];
  if (rows > 0) {
    SharedGather::Row& last = list[rows - 1];
    const bool is_second = last.count == 1 && begin > last.begin;  // it sets the row's stride
    if (last.length == length &&
        (is_second || begin == uint64_t{last.begin} + uint64_t{last.stride} * last.count)) {
      if (is_second) last.stride = begin - last.begin;
      ++last.count;
      return true;
    }
  }
  if (rows == list.size()) return false;
  list[rows++] = {begin, length, 0, 1};
  if (rows < list.size()) list[rows].count = 0;
  return true;
}

// Waits for all ranks, writes this rank's slot of the round just filled, if any, and begins the
// earliest round that a rank wants, in the other half. That half is free: each rank wrote its slot
// there before it arrived here.
void Gather::meet(uint64_t wanted, WriteOut write) {
  // Relaxed: `arrived` publishes this store, as well as the slots and lists.
  shared_.head(place_).next[half()].store(wanted, std::memory_order_relaxed);
  std::atomic<uint32_t>& arrived = shared_.head(0).arrived;
  const uint32_t all = (step_ + 1) * static_cast<uint32_t>(shared_.ranks_);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == all) wake_all(arrived);
  wait_until(arrived, board_, rank_,
             [all](uint32_t now) { return static_cast<int32_t>(now - all) >= 0; });
  uint64_t next = kNone;
  for (int place = 0; place < shared_.ranks_; ++place) {
    next = std::min(next, shared_.head(place).next[half()].load(std::memory_order_relaxed));
  }
  if (round_ != kNone) write_own(write);
  round_ = next;
  ++step_;
  std::fill(noted_.begin(), noted_.end(), 0);
  for (int place = 0; place < shared_.ranks_; ++place) {  // empties this rank's lists
    shared_.list_of(place, half(), place_)[0].count = 0;
  }
}

// Merges the lists of all ranks for this rank's slot, and writes each stretch of neighbouring bytes
// in one call. Each list is in order of addresses, since a walk back begins another round.
void Gather::write_own(WriteOut write) {
  const auto ranks = static_cast<size_t>(shared_.ranks_);
  for (size_t from = 0; from < ranks; ++from) {
    const auto list = shared_.list_of(place_, half(), static_cast<int>(from));
    const auto* const end = std::find_if(list.data(), list.data() + list.size(),
                                         [](const auto& row) { return row.count == 0; });
    cursors_[from] = {list.data(), end, 0};
  }
  const auto begin_of = [](const Cursor& cursor) -> uint64_t {
    return cursor.row == cursor.end ? kNone
                                    : cursor.row->begin + uint64_t{cursor.row->stride} * cursor.run;
  };
  const uint64_t round = round_ & ((uint64_t{1} << kWalkBit) - 1);
  const uint64_t window =
      saturating_mul(round * ranks + static_cast<uint64_t>(place_), slot_bytes());
  const std::span<const std::byte> slot(shared_.slot_of(place_, half()), slot_bytes());
  uint64_t begin = 0, end = 0;  // the stretch so far
  const auto flush = [&] {
    if (end > begin) write(window + begin, slot.subspan(begin, end - begin));
  };
  for (size_t from = 0;; ++from) {
    // Usually the next run belongs to the next rank. If not, search for the lowest begin.
    size_t first = from % ranks;
    if (begin_of(cursors_[first]) != end) {
      for (size_t other = 0; other < ranks; ++other) {
        if (begin_of(cursors_[other]) < begin_of(cursors_[first])) first = other;
      }
    }
    Cursor& cursor = cursors_[first];
    if (cursor.row == cursor.end) break;
    if (begin_of(cursor) != end) {
      flush();
      begin = begin_of(cursor);
    }
    end = begin_of(cursor) + cursor.row->length;
    if (++cursor.run == cursor.row->count) {
      ++cursor.row;
      cursor.run = 0;
    }
    from = first;
  }
  flush();
}

}  // namespace modicum
