// The mappings of a process, and the entries of its pages. Internal to `probe`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/probe/kinds.h"

namespace modicum {

// Bits of an entry of /proc/PID/pagemap, which has 8 bytes for each page.
constexpr uint64_t kPresentPage = uint64_t{1} << 63;
constexpr uint64_t kFilePage = uint64_t{1} << 61;  // a file page or shared memory

constexpr bool is_private_memory(uint64_t entry) noexcept {
  return (entry & kPresentPage) != 0 && (entry & kFilePage) == 0;
}

struct ProcessMapping {
  AddressRange at;
  std::string access;  // "rw-p"
  std::string name;    // empty: anonymous, also if the program has named it ("[anon:NAME]")

  bool is_private() const noexcept { return access[3] == 'p'; }
};

// The first line of a mapping in maps and smaps: "7f00-7f20 rw-p OFFSET DEVICE INODE [NAME]".
std::optional<ProcessMapping> mapping_of(std::string_view line);
// Ascending. nullopt if maps can't be read; empty if the process has ended.
std::optional<std::vector<ProcessMapping>> read_mappings(int pid, const std::string& root);

// The number of heaps of threads in mapping `at`, 0 if it has none (see MemoryKind).
uint64_t arena_heaps_in(const std::vector<ProcessMapping>& mappings, size_t at);

}  // namespace modicum
