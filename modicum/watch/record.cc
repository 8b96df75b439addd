#include "modicum/watch/record.h"

#include <algorithm>

namespace modicum {

std::string_view watch_owner_name(size_t owner) noexcept {
  if (owner >= owner_of(MemoryKind{})) {
    return memory_kind_name(static_cast<MemoryKind>(owner - owner_of(MemoryKind{})));
  }
  switch (static_cast<WatchOwner>(owner)) {
    case WatchOwner::copies_since_fork: return "copies_since_fork";
    case WatchOwner::retained_heap: return "retained_heap";
    case WatchOwner::unexplained: return "unexplained";
    case WatchOwner::unattributed: return "held";
    default: return purpose_name(static_cast<Purpose>(owner));
  }
}

uint64_t OwnedMemory::total_bytes() const noexcept {
  uint64_t sum = 0;
  for (const uint64_t owner_kib : kib) sum += owner_kib;
  return sum * kKiB;
}

size_t OwnedMemory::grown_since(const OwnedMemory& before) const noexcept {
  const auto growth = [&](size_t owner) {
    return static_cast<int64_t>(kib[owner]) - static_cast<int64_t>(before.kib[owner]);
  };
  size_t most = 0;
  for (size_t owner = 1; owner < kWatchOwners; ++owner) {
    if (growth(owner) > growth(most)) most = owner;
  }
  return most;
}

OwnedMemory& OwnedMemory::operator+=(const OwnedMemory& other) noexcept {
  for (size_t owner = 0; owner < kWatchOwners; ++owner) {
    const uint64_t sum = uint64_t{kib[owner]} + other.kib[owner];
    kib[owner] = static_cast<uint32_t>(std::min<uint64_t>(sum, UINT32_MAX));
  }
  return *this;
}

bool may_be_missed(uint64_t peak_bytes, uint64_t at_most_bytes) noexcept {
  return at_most_bytes > peak_bytes + std::max(4 * kMiB, peak_bytes / 32);
}

bool WatchRecord::may_have_missed_peak() const noexcept {
  return !killed && may_be_missed(peak_bytes, peak_at_most_bytes);
}

const WatchSample* WatchRecord::peak() const noexcept {
  const auto most = std::max_element(samples.begin(), samples.end(),
                                     [](auto& a, auto& b) { return a.held_bytes < b.held_bytes; });
  return most == samples.end() ? nullptr : &*most;
}

const WatchedPhase* WatchRecord::phase_at(int pid, double at_s) const noexcept {
  const WatchedPhase* found = nullptr;
  for (const WatchedPhase& phase : phases) {
    if (phase.pid == pid && phase.has(at_s)) found = &phase;
  }
  return found;
}

const WatchedPhase* WatchRecord::phase_before(int pid, double at_s) const noexcept {
  const WatchedPhase* found = nullptr;
  for (const WatchedPhase& phase : phases) {
    if (phase.pid != pid || phase.end_s >= at_s) continue;
    if (found == nullptr || phase.end_s > found->end_s) found = &phase;
  }
  return found;
}

}  // namespace modicum
