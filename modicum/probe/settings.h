// Settings of the kernel and resource limits of a process that matter to training with much host
// memory. A setting that can't be read is nullopt, 0 or empty. `root` is a prefix of every path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace modicum {

// A resource limit as in setrlimit(2), which defines its unit; UINT64_MAX is "unlimited".
struct ResourceLimit {
  uint64_t soft = 0;
  uint64_t hard = 0;

  bool is_unlimited() const noexcept { return soft == UINT64_MAX; }
};

struct Settings {
  std::optional<ResourceLimit> locked_memory;  // bytes: by mlock(2), or pinned for devices
  std::optional<ResourceLimit> open_files;
  std::optional<ResourceLimit> address_space;  // bytes
  bool may_lock_all = false;                   // CAP_IPC_LOCK: no limit on locked memory
  // The word in brackets of /sys/kernel/mm/transparent_hugepage; empty if it can't be read.
  std::string huge_pages;        // "always", "madvise" or "never"
  std::string shmem_huge_pages;  // "always", "within_size", "advise", "never", "deny", "force"
  std::optional<uint64_t> swap_bytes;
  uint64_t swap_free_bytes = 0;
  // vm.overcommit_memory. If it is 2, the kernel refuses an allocation with which all processes
  // together would exceed `commit_limit_bytes`, untouched memory included.
  std::optional<uint64_t> overcommit;
  uint64_t commit_limit_bytes = 0;
  uint64_t committed_bytes = 0;
  std::optional<uint64_t> shm_bytes;  // the size of /dev/shm
  uint64_t shm_free_bytes = 0;
  std::optional<uint64_t> max_map_count;  // memory mappings of one process
};

// Reads the limits of process `pid` (0: the caller), its /dev/shm and the kernel's settings.
Settings read_settings(int pid = 0, const std::string& root = "");

}  // namespace modicum
