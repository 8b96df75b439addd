// The door of `probe`: memory and CPU limits, and memory in use, of a process, its cgroup and the
// node, as reported by the kernel. Read-only (but for reset_peak_rss). `root` is put before every
// path, so that tests can supply another machine's /proc and /sys.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/probe/program.h"   // IWYU pragma: export
#include "modicum/probe/settings.h"  // IWYU pragma: export
#include "modicum/spec/spec.h"

namespace modicum {

// Bytes, from /proc/PID/status and /proc/PID/smaps_rollup.
struct ProcessMemory {
  uint64_t rss_anon = 0;
  uint64_t rss_shmem = 0;
  uint64_t rss = 0;
  uint64_t peak_rss = 0;     // VmHWM: the highest `rss` since the start or the last reset
  uint64_t page_tables = 0;  // VmPTE
  uint64_t pss_anon = 0;     // proportional: each sharer of a page counts an equal part
  uint64_t pss_shmem = 0;

  // The memory attributed to this process, without the page cache.
  uint64_t held() const noexcept { return pss_anon + pss_shmem + page_tables; }
  // `held` at its highest: now, plus the distance of VmHWM, which misses no peak, from `rss`.
  uint64_t peak_held() const noexcept { return held() + (peak_rss > rss ? peak_rss - rss : 0); }
};

// The memory of process `pid`, 0 for the caller. IO if the process does not exist or has ended. On
// kernels without smaps_rollup the `pss_` fields equal the `rss_` ones.
ProcessMemory read_process_memory(int pid = 0, const std::string& root = "");
// Resets VmHWM of this process. Returns whether the kernel allowed it.
bool reset_peak_rss();

// Identifies a process, although pids are reused: `host` identifies the host, its boot and the
// container, in letters, digits, dots and underscores; `started` is the kernel's start time of the
// process, 0 if there is no such process.
struct ProcessIdentity {
  std::string host;
  int64_t pid = 0;
  uint64_t started = 0;
};
ProcessIdentity identify_process(int64_t pid, const std::string& root = "");
// Whether the process has ended. False if that can't be known, as for a process of another host.
bool is_dead(const ProcessIdentity& of, const std::string& root = "");

// What /proc/PID/status says about a process. One file, about 20 us; no shared page is divided, and
// none is walked, so that the process is not slowed down. Bytes.
struct ProcessStatus {
  int parent = 0;
  std::string name;  // the kernel's, at most 15 bytes
  bool is_alive = true;
  uint64_t rss_anon = 0;
  uint64_t rss_shmem = 0;
  uint64_t rss_file = 0;  // mapped page cache
  uint64_t peak_rss = 0;  // VmHWM, page cache included
  uint64_t page_tables = 0;
  uint64_t locked = 0;

  bool operator==(const ProcessStatus&) const = default;
};
// nullopt if there is no such process. A process that has ended and was not waited for has a name,
// no memory, and is not alive.
std::optional<ProcessStatus> read_status(int pid, const std::string& root = "");

// Pss_Anon + Pss_Shmem of a process, in bytes. The kernel walks every page: 10 to 50 ms per GiB.
// nullopt if it can't be read (ended, another user's, a kernel before 5.4).
std::optional<uint64_t> read_pss(int pid, const std::string& root = "");

// Minor page faults of a process so far, 0 if there is none. A copy-on-write is one.
uint64_t read_minor_faults(int pid, const std::string& root = "");

// How a process that has ended, and was not waited for yet, ended (as waitpid(2)). nullopt for any
// other process.
std::optional<int> read_wait_status(int pid, const std::string& root = "");

// The rank that a launcher gave to a process through its environment: RANK, OMPI_COMM_WORLD_RANK,
// SLURM_PROCID or LOCAL_RANK, the first that is a number. Forked children have their parent's.
struct GivenRank {
  int rank = 0;
  std::string_view variable;

  bool operator==(const GivenRank&) const = default;
};
std::optional<GivenRank> rank_of(int pid, const std::string& root = "");

// The children of a process, by any of its threads, ascending. Unlike `descendants` it reads only
// the process's own files; needs CONFIG_PROC_CHILDREN, which distributions set.
std::vector<int> children_of(int pid, const std::string& root = "");
// A number that changes whenever a process or thread is made (the last pid); 0 if it is unknown.
uint64_t last_pid(const std::string& root = "");

// All descendants of process `pid`, 0 for the caller, ascending; including zombies.
std::vector<int> descendants(int pid = 0, const std::string& root = "");

// A half-open range of virtual addresses.
struct AddressRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Bytes of resident private pages. A page mapped by several processes counts once.
struct RangeMemory {
  uint64_t own_bytes = 0;  // pages of the root process
  // Different pages of forked descendants at the same addresses, from copy-on-write: one side has
  // written since the fork, the other kept the previous content.
  uint64_t copied_bytes = 0;
  // Of own_bytes: pages that forked descendants map, too. A write by either side copies them.
  uint64_t shared_bytes = 0;
};

struct TreeMemory {
  struct Process {
    int pid = 0;
    bool is_forked = false;  // forked from the root process, without an exec since
    ProcessMemory memory;
    uint64_t shared_bytes = 0;  // of a forked process: pages that the root process maps, too
  };
  std::vector<Process> processes;   // the root process, then its descendants
  std::vector<RangeMemory> ranges;  // in the order of the request
  RangeMemory rest;                 // of the root process's other addresses
};

// The memory of the root process `pid` (0 for the caller) and its descendants, with their private
// pages attributed to ranges of the root's addresses. A page of parent P and child C that was
// written before the fork:
//
//                         frame in P   frame in C    counted as
//   neither has written   7            7             own 1, shared 1
//   one side has written  8            7             own 1, copied 1
//   C mapped it elsewhere -            9             only in C's `memory`
//
// `ranges` are ascending and disjoint (else USAGE). Shared memory is only in `memory`. Pages shared
// with processes outside of the tree are not counted. Needs no privilege for the caller's own
// processes and takes about 0.1 s per GiB. IO if /proc can't be read.
TreeMemory read_tree(int pid, std::span<const AddressRange> ranges, const std::string& root = "");

// Bytes that a process holds in addition because of copy-on-write: private pages that differ from
// those of the process it was forked from, at addresses that both map. The old content of a page
// that the parent has written since, or the new content of one that the child has written. Pages
// shared by several children are divided among them.
struct ForkCopies {
  int pid = 0;
  int forked_from = 0;  // the closest living ancestor without an exec in between
  uint64_t bytes = 0;
};
// The copies of every process below `pid` (0: the caller) that was forked without an exec since.
// The sum is exact with the privilege to read frame numbers; without it, copies of different forks
// of one page count once (see read_tree). An area that parent and child have mapped separately at
// the same address since the fork counts as well. Takes about 0.1 s per GiB.
std::vector<ForkCopies> read_fork_copies(int pid, const std::string& root = "");

// A memory limit of a process: one level of its cgroup chain (v1 or v2), or the node.
struct MemoryLimit {
  std::string source;  // "cgroup v1 /a/b", "cgroup v2 /a/b", "MemAvailable"
  uint64_t limit_bytes = 0;
  uint64_t available_bytes = 0;  // limit - usage + reclaimable page cache
  uint64_t page_cache_bytes = 0;
  uint64_t shmem_bytes = 0;  // files in tmpfs and shared memory: not reclaimed without swap
};

// All limits of process `pid` (0: the caller), least available bytes first; not empty if /proc is
// mounted. Levels without a limit, or that can't be read, are omitted. In v2 `limit_bytes` is the
// lower of memory.max and memory.high.
std::vector<MemoryLimit> memory_limits(const std::string& root = "", int pid = 0);

// One level of a cgroup chain with a memory controller.
struct MemoryCgroup {
  int version = 1;
  std::string name;       // as in /proc/PID/cgroup, "/" at the root of the part that is mounted
  std::string directory;  // of its files

  bool operator==(const MemoryCgroup&) const = default;
};
// This process's own memory cgroup and those around it, the own one first. With v1 and v2 both
// mounted, the chain of v1, which then has the controller.
std::vector<MemoryCgroup> memory_cgroups(const std::string& root = "");
// Bytes charged to a cgroup, page cache included; 0 if it can't be read.
uint64_t charged_to(const MemoryCgroup& group);
// The most bytes that were charged to it at one time; 0 if it can't be read (v2: before Linux 5.19,
// and at the root).
uint64_t peak_charged_to(const MemoryCgroup& group);
// The part of it that is page cache.
uint64_t page_cache_of(const MemoryCgroup& group);
// OOM kills in a cgroup so far (in v2 also in those below it).
uint64_t oom_kills_in(const MemoryCgroup& group);

// The highest memory of this process's own cgroup while this object lives.
class CgroupPeak {
 public:
  explicit CgroupPeak(std::string root = "");
  // Page cache included. nullopt if the cgroup's maximum can't be read, or was reached before.
  std::optional<uint64_t> bytes() const;

 private:
  uint64_t now() const;
  std::string root_;
  uint64_t before_ = 0;
};

// The number of CPUs that this process may use: its affinity mask, or less if a CPU quota of its
// cgroup chain (v1 or v2) is lower; at least 1.
int granted_cpus(const std::string& root = "");

// OOM kills so far, summed over the levels of the cgroup chain of process `pid` (0: the caller).
// One kill may count at several levels, and upper levels include other children: only whether the
// sum grew is meaningful.
uint64_t oom_kill_count(const std::string& root = "", int pid = 0);

}  // namespace modicum
