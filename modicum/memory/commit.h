// Page sizes and committing of pages. Internal to `memory`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"

namespace modicum {

constexpr uint64_t kHugePageBytes = 2 * kMiB;

// `bytes` rounded up to whole pages; nullopt if that exceeds an address space.
constexpr std::optional<uint64_t> whole_pages(uint64_t bytes) noexcept {
  constexpr uint64_t kAddressSpace = uint64_t{1} << 56;
  if (bytes > kAddressSpace) return std::nullopt;
  return round_up(bytes, kPageBytes);
}

// Commits every page of `part` on up to `threads` threads. Keeps the contents. Throws NOMEM and any
// exception of `poll`.
void commit_pages(std::span<std::byte> part, int threads, Poll poll);

[[noreturn]] void fail_to_commit(int error, uint64_t bytes);  // throws NOMEM with errno's text

}  // namespace modicum
