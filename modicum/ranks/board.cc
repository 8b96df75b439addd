#include "modicum/ranks/board.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace modicum {
namespace {

// Copies `text`, truncated to N - 1 bytes.
template <size_t N>
void put(char (&field)[N], const std::string& text) noexcept {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), n);
  field[n] = '\0';
}

// The inverse of owners_of(). Drops owners whose name is not that of a purpose.
Footprint footprint_of(const std::vector<Owner>& owners) noexcept {
  Footprint footprint;
  for (const Owner& owner : owners) {
    for (size_t p = 0; p < footprint.bytes.size(); ++p) {
      if (owner.purpose == purpose_name(static_cast<Purpose>(p))) footprint.bytes[p] = owner.bytes;
    }
  }
  return footprint;
}

// The polling interval. It grows with the number of ranks, so that many waiting ranks use little
// CPU time.
int64_t poll_ns_of(int ranks) noexcept { return kNsPerMs * std::clamp(ranks / 64, 1, 100); }

size_t checked_ranks(int ranks) {
  if (ranks >= 1) return static_cast<size_t>(ranks);
  fail(Category::usage, "a board needs ranks",
       {.expected = "1 or more", .got = std::to_string(ranks)});
}

}  // namespace

ErrorRecord record_of(const Error& error, std::optional<int> rank) {
  ErrorRecord record;
  const Facts& facts = error.facts();
  record.category = error.category();
  record.rank = facts.rank ? facts.rank : rank;
  record.pid = getpid();
  record.culprit_rank = facts.culprit_rank;
  record.culprit_pid = facts.culprit_pid;
  record.offset = facts.offset;
  record.shortfall_bytes = facts.shortfall_bytes;
  record.owners = footprint_of(facts.owners);
  put(record.what, error.what_happened());
  put(record.file, facts.file);
  put(record.tensor, facts.tensor);
  put(record.expected, facts.expected);
  put(record.got, facts.got);
  return record;
}

Error error_of(const ErrorRecord& record) {
  return Error(record.category, record.what,
               {.file = record.file,
                .tensor = record.tensor,
                .offset = record.offset,
                .rank = record.rank,
                .culprit_rank = record.culprit_rank,
                .culprit_pid = record.culprit_pid,
                .expected = record.expected,
                .got = record.got,
                .shortfall_bytes = record.shortfall_bytes,
                .owners = owners_of(record.owners)});
}

void Board::check() const {
  if (const auto failed = failure()) {
    const std::optional<int> culprit = failed->culprit_rank ? failed->culprit_rank : failed->rank;
    const auto pid = failed->culprit_rank ? failed->culprit_pid : std::optional(failed->pid);
    const std::string who = culprit ? fmt::format("rank {}", *culprit) : "the launcher";
    fail(Category::peer, fmt::format("{} failed: {}", who, failed->what),
         {.culprit_rank = culprit, .culprit_pid = pid});
  }
}

// The process that first sets `claimed` writes `failure`, then sets `written`. Until then, readers
// see no failure.
struct SharedBoard::Head {
  std::atomic<uint32_t> claimed{0};
  std::atomic<uint32_t> written{0};
  ErrorRecord failure;
};

struct alignas(64) SharedBoard::Slot {
  std::atomic<uint64_t> progress{0};
  std::atomic<int64_t> beat_ns{0};
  std::atomic<uint32_t> round{0};    // barriers reached
  std::atomic<uint32_t> waiting{0};  // 1 in a barrier
  std::atomic<uint32_t> done{0};     // 1 after its body has returned
  uint32_t result_bytes = 0;
  Digest digest;
  std::byte result[kResultBytes];
};

SharedBoard::SharedBoard(int ranks, Clock& clock)
    : mapping_(Mapping::shared(sizeof(Head) + 64 + checked_ranks(ranks) * sizeof(Slot))),
      ranks_(ranks),
      clock_(clock) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);  // shared between processes
  new (mapping_.bytes().data()) Head;
  for (int rank = 0; rank < ranks; ++rank) new (&slot(rank)) Slot;
}

SharedBoard::Head& SharedBoard::head() const noexcept {
  return *reinterpret_cast<Head*>(mapping_.bytes().data());
}

SharedBoard::Slot& SharedBoard::slot(int rank) const {
  // The constructor adds 64 bytes for this padding.
  std::byte* const first = mapping_.bytes().data() + round_up(sizeof(Head), alignof(Slot));
  return reinterpret_cast<Slot*>(first)[checked_rank(rank, ranks_)];
}

void SharedBoard::beat(int rank, uint64_t more_bytes) {
  // Relaxed: the supervisor only compares times, and no other data depends on them.
  slot(rank).progress.fetch_add(more_bytes, std::memory_order_relaxed);
  slot(rank).beat_ns.store(clock_.now_ns(), std::memory_order_relaxed);
}

bool SharedBoard::report(const ErrorRecord& failure) noexcept {
  uint32_t expected = 0;
  if (!head().claimed.compare_exchange_strong(expected, 1)) return false;
  head().failure = failure;
  head().written.store(1, std::memory_order_release);
  return true;
}

std::optional<ErrorRecord> SharedBoard::failure() const {
  if (head().written.load(std::memory_order_acquire) == 0) return std::nullopt;
  return head().failure;
}

void SharedBoard::wait_for_all(int rank, uint32_t round) {
  slot(rank).waiting.store(1, std::memory_order_relaxed);
  for (int peer = 0; peer < ranks_;) {
    if (slot(peer).round.load(std::memory_order_acquire) >= round) {
      ++peer;
      continue;
    }
    check();
    clock_.sleep_ns(poll_ns_of(ranks_));
  }
  // Before `waiting` is reset, so that the supervisor never takes the time in the barrier for
  // silence.
  slot(rank).beat_ns.store(clock_.now_ns(), std::memory_order_relaxed);
  slot(rank).waiting.store(0, std::memory_order_release);
}

void SharedBoard::barrier(int rank) {
  const uint32_t round = slot(rank).round.load(std::memory_order_relaxed) + 1;
  slot(rank).round.store(round, std::memory_order_release);
  wait_for_all(rank, round);
}

void SharedBoard::agree(int rank, const Digest& digest) {
  slot(rank).digest = digest;
  barrier(rank);
  for (int peer = 1; peer < ranks_; ++peer) {
    if (slot(peer).digest == slot(0).digest) continue;
    fail(Category::conflict, fmt::format("rank {} has other inputs than rank 0", peer),
         {.culprit_rank = peer, .expected = slot(0).digest.hex(), .got = slot(peer).digest.hex()});
  }
}

uint64_t SharedBoard::progress(int rank) const {
  return slot(rank).progress.load(std::memory_order_relaxed);
}
int64_t SharedBoard::last_beat_ns(int rank) const {
  return slot(rank).beat_ns.load(std::memory_order_relaxed);
}
bool SharedBoard::is_waiting(int rank) const {
  return slot(rank).waiting.load(std::memory_order_acquire) != 0;
}
void SharedBoard::set_done(int rank) { slot(rank).done.store(1, std::memory_order_release); }
bool SharedBoard::is_done(int rank) const {
  return slot(rank).done.load(std::memory_order_acquire) != 0;
}

void SharedBoard::post(int rank, std::span<const std::byte> result) {
  const size_t n = std::min(result.size(), kResultBytes);
  std::memcpy(slot(rank).result, result.data(), n);
  slot(rank).result_bytes = static_cast<uint32_t>(n);
}

std::span<const std::byte> SharedBoard::posted(int rank) const {
  return std::span<const std::byte>(slot(rank).result).first(slot(rank).result_bytes);
}

}  // namespace modicum
