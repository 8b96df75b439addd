#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "modicum/memory/commit.h"
#include "modicum/memory/memory.h"

namespace modicum {
namespace {

[[noreturn]] void fail_over_budget(const std::string& what, uint64_t limit, uint64_t total,
                                   const Footprint& owners) {
  fail(Category::budget, fmt::format("{}: {}", what, over_budget(limit, total)),
       {.expected = std::to_string(limit),
        .got = std::to_string(total),
        .shortfall_bytes = total - limit,
        .owners = owners_of(owners)});
}

// Calls `take`, which allocates `bytes` for `purpose`. If it throws NOMEM, adds this need and the
// memory held to the error.
template <typename Take>
auto naming_need(Purpose purpose, uint64_t bytes, const Footprint& footprint, const Take& take) {
  try {
    return take();
  } catch (const Error& error) {
    if (error.category() != Category::no_memory) throw;
    Facts facts = error.facts();
    facts.got = fmt::format("a request for {} bytes of {}", bytes, purpose_name(purpose));
    facts.owners = owners_of(footprint);
    fail(error.category(),
         fmt::format("{}; {} are held already", error.what_happened(),
                     format_size(footprint.total())),
         std::move(facts));
  }
}

}  // namespace

Charge Charge::split(uint64_t bytes) {
  MODICUM_ASSERT(bytes <= this->bytes());
  Entry part = entry();
  part.bytes = bytes;
  ledger_.get_deleter().bytes -= bytes;
  return Charge(ledger_.get(), part);
}

void Charge::Entry::operator()(Ledger* ledger) const noexcept {
  const std::lock_guard lock(ledger->mutex_);
  ledger->footprint_[purpose] -= bytes;
  ledger->reporter_.remove(purpose, bytes);
  if (is_copied) ledger->footprint_[Purpose::fork] -= bytes;
}

// Unmaps the pages before the entry is returned: memory that is still mapped must not count as
// free.
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  mapping_ = std::move(other.mapping_);
  charge_ = std::move(other.charge_);
  return *this;
}

Buffer Ledger::reserve(Purpose purpose, uint64_t bytes, Fork fork) {
  return naming_need(purpose, bytes, footprint(), [&] { return map(purpose, bytes, fork); });
}

// Books before it maps, so that the limit is not exceeded even briefly. If mapping fails, the
// Charge returns the entry.
Buffer Ledger::map(Purpose purpose, uint64_t bytes, Fork fork) {
  if (bytes == 0) return {};
  const std::optional<uint64_t> size = whole_pages(bytes);
  Charge booked = book(purpose, size.value_or(bytes), fork == Fork::inherited);
  if (!size) fail_to_commit(ENOMEM, bytes);
  return {std::move(booked), Mapping::aligned(*size, fork)};
}

Buffer Ledger::charge(Purpose purpose, uint64_t bytes, int threads, Poll poll, Fork fork) {
  MODICUM_ASSERT(threads >= 1);
  return naming_need(purpose, bytes, footprint(), [&] {
    Buffer buffer = map(purpose, bytes, fork);
    commit_pages(buffer.bytes(), threads, poll);
    return buffer;
  });
}

Charge Ledger::charge_shared(Purpose purpose, std::span<std::byte> part) {
  MODICUM_ASSERT(reinterpret_cast<uintptr_t>(part.data()) % kPageBytes == 0);
  MODICUM_ASSERT(part.size() % kPageBytes == 0);
  return naming_need(purpose, part.size(), footprint(), [&] {
    Charge booked = book(purpose, part.size());
    commit_pages(part, 1, kNoPoll);
    return booked;
  });
}

void Ledger::require_room(const Footprint& needed, std::string_view what) const {
  Footprint all = footprint();
  const uint64_t limit = limit_bytes();
  all += needed;
  if (all.total() <= limit) return;
  fail_over_budget(fmt::format("{} takes {}", what, format_size(needed.total())), limit,
                   all.total(), all);
}

Charge Ledger::adopt(Purpose purpose, uint64_t bytes) { return book(purpose, bytes); }

Charge Ledger::book(Purpose purpose, uint64_t bytes, bool is_copied) {
  const std::lock_guard lock(mutex_);
  const uint64_t before = footprint_.total();
  const uint64_t more = is_copied ? saturating_add(bytes, bytes) : bytes;
  // Compares without forming the sum, which may overflow.
  if (more > limit_bytes_ - std::min(before, limit_bytes_)) {
    fail_over_budget(
        fmt::format("no room for {} of {}{}", format_size(bytes), purpose_name(purpose),
                    is_copied ? " (counted twice, since forked children may keep copies)" : ""),
        limit_bytes_, saturating_add(before, more), footprint_);
  }
  footprint_[purpose] += bytes;
  reporter_.add(purpose, bytes);
  if (is_copied) footprint_[Purpose::fork] += bytes;
  if (before + more > at_peak_.total()) at_peak_ = footprint_;
  since_mark_ = std::max(since_mark_, before + more);
  return Charge(this, {purpose, bytes, is_copied});
}

void Ledger::set_limit(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_bytes_ = bytes;
}

void Ledger::mark() {
  const std::lock_guard lock(mutex_);
  since_mark_ = footprint_.total();
}

}  // namespace modicum
