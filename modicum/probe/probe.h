// The public header of `probe`: limits on memory and CPUs, and the memory in use, as the kernel
// reports them for a process, its cgroups and the node. Only reset_peak_rss changes anything.
// `root` is a prefix of every path that is read, so that tests can supply another machine's /proc
// and /sys.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/probe/kinds.h"     // IWYU pragma: export
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
  uint64_t held_bytes() const noexcept { return pss_anon + pss_shmem + page_tables; }
  // An estimate of the highest `held_bytes` so far: `held_bytes` now plus the amount by which the
  // RSS is below its peak (VmHWM - VmRSS). The kernel itself keeps VmHWM, so that no short peak is
  // missed.
  uint64_t peak_held() const noexcept {
    return held_bytes() + (peak_rss > rss ? peak_rss - rss : 0);
  }
};

// The memory of process `pid`, 0 for the caller; none while another process is in its parent's
// memory. Throws IO if the process does not exist or has ended. A `pss_` field equals its `rss_`
// counterpart if smaps_rollup can't be read or lacks it (before Linux 5.4).
ProcessMemory read_process_memory(int pid = 0, const std::string& root = "");
// Resets VmHWM of this process. Returns whether the kernel allowed it.
bool reset_peak_rss();

// Identifies a process even after its pid is reused. `host` identifies the host, its boot and the
// container, in letters, digits, dots and underscores. `started` is the start time in the kernel's
// clock ticks, 0 if the process does not exist or has ended (a zombie).
struct ProcessIdentity {
  std::string host;
  int64_t pid = 0;
  uint64_t started = 0;
};
ProcessIdentity identify_process(int64_t pid, const std::string& root = "");
// The inode number of this process's pid namespace, which is unique on the machine; 0 if unknown.
uint64_t pid_namespace(const std::string& root = "");
constexpr uint64_t kInitialPidNamespace = 4026531836;  // the kernel's PROC_PID_INIT_INO
// Whether there is a process with this pid, be it hidden in /proc or another user's.
bool process_exists(int64_t pid);
// Whether the process has ended. False if that can't be determined from here: it is of another host
// or container, or its `started` was not known. `exists` is asked if /proc does not show the
// process, as under hidepid.
bool is_dead(const ProcessIdentity& process, const std::string& root = "",
             const std::function<bool(int64_t pid)>& exists = process_exists);

// Bytes and facts from /proc/PID/status. Reading this one file takes about 20 us. The kernel walks
// no pages for it, so the process is not slowed down; shared pages count in full.
struct ProcessStatus {
  int parent = 0;
  std::string name;      // the kernel's, at most 15 bytes
  bool is_alive = true;  // false for a zombie
  uint64_t rss_anon = 0;
  uint64_t rss_shmem = 0;
  uint64_t rss_file = 0;  // mapped page cache
  uint64_t peak_rss = 0;  // VmHWM, page cache included
  uint64_t page_tables = 0;
  uint64_t locked = 0;  // VmLck

  bool operator==(const ProcessStatus&) const = default;
};
// nullopt if there is no such process. A zombie has a name and no memory, and is not alive. A
// process whose main thread has ended is alive as long as another of its threads is.
std::optional<ProcessStatus> read_status(int pid, const std::string& root = "");

// Whether a living process descends from `ancestor`. Faster than `descendants`.
bool is_descendant(int pid, int ancestor, const std::string& root = "");

// Whether a process runs in its parent's memory, as a child does between vfork(2) or posix_spawn(3)
// and its exec: the kernel shows the parent's figures for both. Once false it stays false. If the
// kernel refuses kcmp(2), as in many containers, such a child is recognised by its figures, which
// equal the parent's; a child of fork(2) maps fewer pages of files.
bool is_in_parents_memory(int pid, const std::string& root = "");

// The sums over all mappings of a process, in bytes.
struct MappingSums {
  uint64_t pss_anon = 0;
  uint64_t pss_shmem = 0;
  uint64_t huge_pages = 0;  // in huge pages: AnonHugePages + ShmemPmdMapped, shared pages in full

  bool operator==(const MappingSums&) const = default;
};
// The kernel walks every page: 10 to 50 ms per GiB. nullopt if the sums can't be read: the process
// has ended or is another user's, or the kernel is older than 5.4.
std::optional<MappingSums> read_mapping_sums(int pid, const std::string& root = "");
// The Pss_Anon + Pss_Shmem of read_mapping_sums.
std::optional<uint64_t> read_pss(int pid, const std::string& root = "");

// Minor page faults of a process so far; 0 if there is no such process. A copy-on-write costs one.
uint64_t read_minor_faults(int pid, const std::string& root = "");

// The wait status (as of waitpid(2)) of a zombie; nullopt for any other process. The kernel shows 0
// as the status of another user's zombie.
std::optional<int> read_wait_status(int pid, const std::string& root = "");

// The rank that a launcher gave to a process through its environment: RANK, OMPI_COMM_WORLD_RANK,
// SLURM_PROCID or LOCAL_RANK, the first that is a number. Children inherit their parent's
// variables.
struct GivenRank {
  std::optional<int> rank;    // nullopt: none of these variables has a number
  std::string_view variable;  // the name of the variable; empty without a rank

  bool operator==(const GivenRank&) const = default;
};
// nullopt if the environment can't be read (the process has ended, or is another user's), or if
// it is empty (the process is ending, or has no variables).
std::optional<GivenRank> rank_of(int pid, const std::string& root = "");

// The children of all threads of a process, ascending. Unlike `descendants`, reads only the
// process's own files. Empty if the kernel lacks CONFIG_PROC_CHILDREN, which distributions set.
std::vector<int> children_of(int pid, const std::string& root = "");
// The pid that the kernel assigned last, in the caller's pid namespace. It changes whenever a
// process or thread is created there. 0 if it can't be read.
uint64_t last_pid(const std::string& root = "");

// All descendants of process `pid`, 0 for the caller, ascending; including zombies.
std::vector<int> descendants(int pid = 0, const std::string& root = "");

// Bytes of resident private pages of a tree of processes (read_tree). A page mapped by several
// processes counts once.
struct RangeMemory {
  uint64_t own_bytes = 0;  // pages of the root process
  // Other pages at the same addresses, which only forked descendants map: since the fork one side
  // has written to the page, and the other side has kept the old content.
  uint64_t copied_bytes = 0;
  // The part of own_bytes that forked descendants map, too. A write by either side copies it.
  uint64_t shared_bytes = 0;
};

struct TreeMemory {
  struct Process {
    int pid = 0;
    bool is_forked = false;  // by a chain of forks from the root process, without an exec since
    ProcessMemory memory;
    uint64_t shared_bytes = 0;  // in pages that the root process maps, too; 0 unless forked
  };
  std::vector<Process> processes;   // the root process, then its descendants
  std::vector<RangeMemory> ranges;  // in the order of the request
  RangeMemory rest;                 // all other addresses of the root process
};

// The memory of the root process `pid` (0 for the caller) and its descendants, with their private
// pages attributed to ranges of the root's addresses. How one page at an address of the root
// process P counts, if P forked C:
//
//                               frame in P   frame in C    counts as
//   no write since the fork     7            7             own 1, shared 1
//   a write by either since     8            7             own 1, copied 1
//   not mapped in P             -            9             only in `memory` of C
//
// Shared memory (shmem) counts in `memory` only. A page is not counted if one process of the tree
// maps it and all other processes that map it are outside of the tree. Needs no privilege for
// processes of the caller's user. Takes about 0.1 s per GiB. Throws USAGE unless `ranges` are
// ascending and disjoint, IO if process `pid` does not exist or its /proc can't be read.
TreeMemory read_tree(int pid, std::span<const AddressRange> ranges, const std::string& root = "");

// The extra memory that copy-on-write has cost a forked process: private pages that differ from the
// parent's at the same address. Such a page has the old content if the parent has written to it
// since the fork, or new content if the child has written to it. A page that several children share
// is divided among them.
struct ForkCopies {
  int pid = 0;
  int forked_from = 0;  // its parent
  uint64_t bytes = 0;
};
// The copies of each descendant of `pid` (0: the caller) that has not run exec since its living
// parent forked it. With CAP_SYS_ADMIN, which reading frame numbers needs, pages that are shared by
// different groups of processes are told apart (up to 8 pages at one address). Without it, all
// shared pages at one address count as one. An area that parent and child have mapped separately at
// the same address since the fork counts as well. Takes about 0.1 s per GiB.
//
// A *family* is a process that was not forked and its forked descendants. Before a family is read,
// `may_read` is asked with the first process's pid; families that it refuses are left out.
std::vector<ForkCopies> read_fork_copies(int pid, const std::string& root = "",
                                         const std::function<bool(int family)>& may_read = {});

// A memory limit of a process: one level of its cgroup chain (v1 or v2), or the node.
struct MemoryLimit {
  std::string source;  // "cgroup v1 /a/b", "cgroup v2 /a/b", "MemAvailable"
  uint64_t limit_bytes = 0;
  uint64_t available_bytes = 0;  // limit - (usage - page cache); for the node: MemAvailable
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
  std::string name;       // its path, as in /proc/PID/cgroup
  std::string directory;  // the directory with its files

  bool operator==(const MemoryCgroup&) const = default;
};
// This process's memory cgroup, then its ancestors, all of one version: v1 if a v1 hierarchy has
// the memory controller (v2 may be mounted as well), else v2.
std::vector<MemoryCgroup> memory_cgroups(const std::string& root = "");
// Bytes charged to a cgroup, page cache included; 0 if it can't be read.
uint64_t charged_to(const MemoryCgroup& group);
// The highest charged_to so far; 0 if it can't be read (in v2: before Linux 5.19, or at the root).
uint64_t peak_charged_to(const MemoryCgroup& group);
// What is charged to a cgroup and those below it, by memory.stat.
struct MemoryCharges {
  uint64_t anon_bytes = 0;   // private memory; a page counts once, whatever processes share it
  uint64_t shmem_bytes = 0;  // as in MemoryLimit
  uint64_t page_cache_bytes = 0;
};
// nullopt if it can't be read.
std::optional<MemoryCharges> memory_charges(const MemoryCgroup& group);
// OOM kills in a cgroup so far (in v2 also in those below it).
uint64_t oom_kills_in(const MemoryCgroup& group);

// How long processes have waited for memory so far (the kernel's PSI), because of reclaim, swapping
// or page cache that was dropped too early.
struct MemoryPressure {
  std::string source;    // "cgroup v2 /a/b", "node"
  uint64_t some_us = 0;  // at least one process waited
  uint64_t full_us = 0;  // all processes that could run waited

  bool operator==(const MemoryPressure&) const = default;
};
// The pressure of the first of `groups` that reports one (v2 only), else of the node. nullopt on
// kernels without PSI.
std::optional<MemoryPressure> memory_pressure(std::span<const MemoryCgroup> groups,
                                              const std::string& root = "");

// The highest charged_to of this process's cgroup while this object lives.
class CgroupPeak {
 public:
  explicit CgroupPeak(std::string root = "");
  // nullopt if the cgroup's maximum can't be read, or was reached before construction.
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
// One kill may count at several levels, and upper levels include the kills in other cgroups: only
// whether the sum has grown is meaningful.
uint64_t oom_kill_count(const std::string& root = "", int pid = 0);
// The innermost cgroup of `chain`, from memory_cgroups, that counts OOM kills: one to which v2's
// memory controller is not delegated does not. Its ancestors also count those of other jobs.
std::optional<MemoryCgroup> counting_group(std::span<const MemoryCgroup> chain);
// OOM kills so far in the counting_group of this process, in v2 also in those below it. 0 without.
uint64_t oom_kills_in_group(const std::string& root = "");

}  // namespace modicum
