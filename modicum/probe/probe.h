// The door of `probe`: what the kernel says a process, its cgroup and the node hold. Reads only.
// `root` is put before every path, so that tests can show it another machine's /proc and /sys.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Bytes, from /proc/PID/status and /proc/PID/smaps_rollup.
struct ProcessMemory {
  uint64_t rss_anon = 0;
  uint64_t rss_shmem = 0;
  uint64_t rss = 0;
  uint64_t peak_rss = 0;     // VmHWM: the highest `rss` since the start or the last reset
  uint64_t page_tables = 0;  // VmPTE
  uint64_t pss_anon = 0;     // shared pages counted in equal parts
  uint64_t pss_shmem = 0;

  // What this process answers for: pss_anon + pss_shmem + page_tables. Page cache is not in it.
  uint64_t held() const noexcept { return pss_anon + pss_shmem + page_tables; }
  // The same at its highest: the counter of the kernel's that can't miss a peak says by how much
  // the past was above now.
  uint64_t peak_held() const noexcept { return held() + (peak_rss > rss ? peak_rss - rss : 0); }
};

// Of process `pid`, 0 for the caller. IO where /proc doesn't say (no such process, or one that has
// ended). Where it doesn't say how much is shared, the `pss_` fields are what the `rss_` ones are.
ProcessMemory read_process_memory(int pid = 0, const std::string& root = "");
// Starts VmHWM of this process anew. False where the kernel doesn't allow it.
bool reset_peak_rss();

// All that descend from process `pid`, 0 for the caller, whoever of them has started them;
// ascending. Those that have ended are among them until somebody waits for them.
std::vector<int> descendants(int pid = 0, const std::string& root = "");

// A half-open range of the addresses of one process.
struct AddressRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Bytes of private pages that are in memory, each counted once however many processes show it.
struct RangeMemory {
  uint64_t own_bytes = 0;  // as the first process shows them
  // What forked descendants show in their place: one side has written since the fork, and the
  // other kept what had been there.
  uint64_t copied_bytes = 0;
};

struct TreeMemory {
  struct Process {
    int pid = 0;
    bool is_forked = false;  // from the first one, without starting a program since
    ProcessMemory memory;
  };
  std::vector<Process> processes;   // the first one, then its descendants
  std::vector<RangeMemory> ranges;  // as they were asked for
  RangeMemory rest;                 // of the first process's address space
};

// What process `pid`, 0 for the caller, and its descendants hold, and whose it is by the ranges of
// the first one's addresses: ascending, without overlap (USAGE). No privilege is needed for
// processes of one's own. Shared memory is in `memory` only; so are pages that descendants have
// taken for themselves since the fork. What the first process shares with processes that are not
// its descendants isn't counted. Takes about 0.1 s per GiB. IO where /proc doesn't say.
TreeMemory read_tree(int pid, std::span<const AddressRange> ranges, const std::string& root = "");

// A memory limit that binds this process: one level of its cgroup chain (v1 or v2), or the node.
struct MemoryLimit {
  std::string source;  // "cgroup v1 /a/b", "cgroup v2 /a/b", "MemAvailable"
  uint64_t limit_bytes = 0;
  uint64_t available_bytes = 0;  // what is left: limit - usage + page cache that can be reclaimed
};

// All that bind, tightest (least available) first; never empty where /proc is mounted. Levels
// without a limit, or that can't be read, are left out. For version 2, `limit_bytes` is the lower
// of memory.max and memory.high.
std::vector<MemoryLimit> memory_limits(const std::string& root = "");

// The CPUs that this process may use: those of its affinity, or fewer where the cgroup chain's
// quota (v1 or v2) grants less time than theirs; at least one.
int granted_cpus(const std::string& root = "");

// How often the kernel has killed for lack of memory in this process's cgroup chain, so far: the
// sum over its levels. One kill may be counted at several of them and the higher ones count their
// other children's too, so only differences mean something, and only that there was a kill.
uint64_t oom_kill_count(const std::string& root = "");

}  // namespace modicum
