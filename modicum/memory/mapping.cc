#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "modicum/memory/commit.h"
#include "modicum/memory/memory.h"

namespace modicum {
namespace {

// MADV_POPULATE_WRITE, Linux 5.14; older C libraries lack the name.
constexpr int kPopulateWrite = 23;
constexpr uint64_t kCommitStepBytes = 16 * kMiB;

// Kernels for arm64 may have pages of 64 KiB: every count of pages would be wrong.
void require_page_size() {
  static const auto size = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (size == kPageBytes) return;
  fail(Category::unsupported, "the kernel's memory pages have another size",
       {.expected = fmt::format("{} bytes", kPageBytes), .got = fmt::format("{} bytes", size)});
}

std::byte* map(uint64_t bytes, int flags, std::byte* place = nullptr) {
  require_page_size();
  void* const at = ::mmap(place, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail_to_commit(errno, bytes);
  return static_cast<std::byte*>(at);
}

// Writes the first byte of every page back to itself. Another process may write to a shared page at
// the same time: what it has written stays.
void touch(std::span<std::byte> part) noexcept {
  for (size_t at = 0; at < part.size(); at += kPageBytes) {
    volatile auto* const byte = reinterpret_cast<volatile unsigned char*>(part.data() + at);
    unsigned char value = __atomic_load_n(byte, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

void commit_step(std::span<std::byte> step) {
  int result = 0;
  do {
    result = ::madvise(step.data(), step.size(), kPopulateWrite);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  // Older kernels commit only on a page fault. That is the second choice, since it cannot return an
  // error: the kernel kills the process instead.
  if (errno != EINVAL && errno != ENOSYS) fail_to_commit(errno, step.size());
  touch(step);
}

}  // namespace

void fail_to_commit(int error, uint64_t bytes) {
  fail(Category::no_memory, fmt::format("the kernel refused {} bytes: {}", bytes,
                                        std::generic_category().message(error)));
}

// Commits in steps, since a step holds the process's mmap lock and cannot be interrupted.
void commit_pages(std::span<std::byte> part, int threads, Poll poll) {
  if (part.empty()) return;
  // Slices end at huge page boundaries, so that no two threads commit the same page.
  const uint64_t huge_pages = (part.size() + kHugePageBytes - 1) / kHugePageBytes;
  const uint64_t workers = std::min<uint64_t>(static_cast<uint64_t>(threads), huge_pages);
  std::atomic<bool> has_failed = false;
  run_workers(static_cast<int>(workers), [&](int worker) {
    const auto index = static_cast<uint64_t>(worker);
    const uint64_t begin = huge_pages * index / workers * kHugePageBytes;
    const uint64_t end =
        std::min<uint64_t>(huge_pages * (index + 1) / workers * kHugePageBytes, part.size());
    try {
      for (uint64_t at = begin; at < end && !has_failed; at += kCommitStepBytes) {
        poll();
        commit_step(part.subspan(at, std::min(kCommitStepBytes, end - at)));
      }
    } catch (...) {
      has_failed = true;
      throw;
    }
  });
}

void Mapping::Unmap::operator()(std::byte* data) noexcept {
  exclusion.end();  // before munmap, after which another mapping may take these addresses
  ::munmap(data, size);
}

Mapping Mapping::shared(uint64_t bytes) {
  if (bytes == 0) return {};
  const std::optional<uint64_t> size = whole_pages(bytes);
  if (!size) fail_to_commit(ENOMEM, bytes);
  return {map(*size, MAP_SHARED), *size};
}

void Buffer::give_up(std::span<std::byte> part) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(part.data());
  const uintptr_t begin = round_up(address, kPageBytes);
  const uintptr_t end = (address + part.size()) / kPageBytes * kPageBytes;
  if (begin >= end) return;
  static_cast<void>(::madvise(part.data() + (begin - address), end - begin,
                              MADV_DONTNEED));  // on failure they stay resident
}

// Huge pages need 2 MiB alignment, which mmap does not guarantee. So this maps `slack` bytes more,
// one page less than 2 MiB, and unmaps both ends. Example with 4 MiB, where mmap returns the
// address 7 MiB:
//
//   address   7 MiB    8 MiB                   12 MiB   13 MiB - 4 KiB
//             | before |  the 4 MiB that stay  |  rest  |
//
// Shared pages then replace the private ones in place: the kernel aligns the huge pages of a shared
// mapping also to the beginning of its file, so the mapping must begin at a 2 MiB boundary.
Mapping Mapping::aligned(uint64_t bytes, Fork fork) {
  const uint64_t slack = bytes >= kHugePageBytes ? kHugePageBytes - kPageBytes : 0;
  std::byte* const reserved = map(bytes + slack, MAP_PRIVATE);
  const auto address = reinterpret_cast<uintptr_t>(reserved);
  const uint64_t before = slack == 0 ? 0 : round_up(address, kHugePageBytes) - address;
  if (before > 0) ::munmap(reserved, before);
  if (slack > before) ::munmap(reserved + before + bytes, slack - before);
  std::byte* const data = reserved + before;
  Mapping mapping(data, bytes);
  if (fork == Fork::shared) map(bytes, MAP_SHARED | MAP_FIXED, data);
  // Small mappings opt out of huge pages: a huge page that spans two neighbouring mappings would
  // stay resident after one of them is unmapped. Both hints fail on kernels without huge pages,
  // which is fine; shared memory also needs /sys/kernel/mm/transparent_hugepage/shmem_enabled.
  static_cast<void>(::madvise(data, bytes, slack != 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
  if (fork == Fork::excluded) mapping.pages_.get_deleter().exclusion = Exclusion(mapping.bytes());
  return mapping;
}

}  // namespace modicum
