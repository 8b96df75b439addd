// The memory of a process by kind, counted from outside. `root` is a prefix of every path that is
// read. Part of the public header of `probe`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace modicum {

// A half-open range of virtual addresses.
struct AddressRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Kinds of memory that the kernel does not give up without swap. All but `shared_memory` are
// private, and their sum is RssAnon.
enum class MemoryKind : uint8_t {
  malloc_heap,    // the main heap of malloc, which brk(2) grows: "[heap]"
  malloc_arenas,  // its heaps of threads: 64 MiB of addresses each, of which the first are used
  stacks,         // of the main thread, and of threads with a guard page below their stack
  file_copies,    // pages of files that were written after mapping: a library's data
  anonymous,      // the rest: mappings of large blocks
  shared_memory,  // RssShmem: tmpfs, memfd, shared mappings
  count
};
constexpr size_t kMemoryKinds = static_cast<size_t>(MemoryKind::count);
std::string_view memory_kind_name(MemoryKind kind) noexcept;  // "malloc_heap"

// Bytes by kind. Shared pages count in full.
struct MemoryKinds {
  std::array<uint64_t, kMemoryKinds> bytes{};
  uint64_t file_bytes = 0;  // RssFile: page cache that the process maps

  uint64_t& operator[](MemoryKind kind) noexcept { return bytes[static_cast<size_t>(kind)]; }
  uint64_t operator[](MemoryKind kind) const noexcept { return bytes[static_cast<size_t>(kind)]; }
  uint64_t total() const noexcept;
  bool operator==(const MemoryKinds&) const = default;
};

// The memory of process `pid`. Reads its list of mappings, and the page table entries of heaps,
// stacks and written files: at most kMaxKindBlocks blocks of 2 MiB, and if there are more, every
// n-th one. The kernel stops changes of the address space for one block at a time (some 50 us). So
// a reading takes at most some 10 ms of CPU time, however much the process holds. nullopt if the
// process has ended, is in its parent's memory, or can't be read (another user's).
std::optional<MemoryKinds> read_memory_kinds(int pid, const std::string& root = "");
constexpr uint64_t kMaxKindBlocks = 128;

struct ProcessKinds {
  int pid = 0;
  std::string name;
  MemoryKinds kinds;
};
// Process `pid` and its descendants, without those that can't be read.
std::vector<ProcessKinds> read_tree_kinds(int pid, const std::string& root = "");

}  // namespace modicum
