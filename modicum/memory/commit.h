// Making pages real: what ledger.cc and mapping.cc share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"

namespace modicum {

constexpr uint64_t kHugePageBytes = 2 * kMiB;

// Rounded up to whole pages; nothing when that is more than an address space holds.
constexpr std::optional<uint64_t> whole_pages(uint64_t bytes) noexcept {
  constexpr uint64_t kAddressSpace = uint64_t{1} << 56;
  if (bytes > kAddressSpace) return std::nullopt;
  return round_up(bytes, kPageBytes);
}

// Commits every page of `part`, which has not been written to, on up to `threads` threads. NOMEM,
// and what `poll` throws.
void commit_pages(std::span<std::byte> part, int threads, Poll poll);

[[noreturn]] void fail_to_commit(int error, uint64_t bytes);  // NOMEM with errno's text

}  // namespace modicum
