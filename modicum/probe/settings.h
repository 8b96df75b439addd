// The kernel's settings, and a process's resource limits, that training with much host memory
// meets. What can't be read is absent. `root` is put before every path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace modicum {

// A resource limit of setrlimit(2), in its own unit; UINT64_MAX is "unlimited".
struct ResourceLimit {
  uint64_t soft = 0;
  uint64_t hard = 0;

  bool is_unlimited() const noexcept { return soft == UINT64_MAX; }
};

struct Settings {
  std::optional<ResourceLimit> locked_memory;  // bytes: mlock and registered buffers
  std::optional<ResourceLimit> open_files;
  std::optional<ResourceLimit> address_space;  // bytes
  bool may_lock_all = false;                   // CAP_IPC_LOCK: no limit on locked memory
  // The word in brackets of /sys/kernel/mm/transparent_hugepage; empty if it can't be read.
  std::string huge_pages;        // "always", "madvise" or "never"
  std::string shmem_huge_pages;  // "always", "within_size", "advise", "never", "deny", "force"
  std::optional<uint64_t> swap_bytes;
  uint64_t swap_free_bytes = 0;
  // vm.overcommit_memory. Under 2 the kernel refuses allocations, also untouched ones, above
  // `commit_limit_bytes` of all processes together.
  std::optional<uint64_t> overcommit;
  uint64_t commit_limit_bytes = 0;
  uint64_t committed_bytes = 0;
  std::optional<uint64_t> shm_bytes;  // the size of /dev/shm
  uint64_t shm_free_bytes = 0;
  std::optional<uint64_t> max_map_count;  // memory mappings of one process
};

// Of process `pid` (0: the caller) and its machine. /dev/shm is the one of that process.
Settings read_settings(int pid = 0, const std::string& root = "");

}  // namespace modicum
