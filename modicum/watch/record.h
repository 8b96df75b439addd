// The record of a watched command after it has ended. Plain values, in bytes and in seconds since
// the command was started. Part of the public header of `watch`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/probe/probe.h"

namespace modicum {

// The owners of a process's memory. The values below `copies_since_fork` are those of Purpose, for
// processes that report their ledgers; those from `first_kind` on are those of MemoryKind.
enum class WatchOwner : uint8_t {
  copies_since_fork = static_cast<uint8_t>(Purpose::count),
  retained_heap,  // freed blocks that malloc keeps; in a process that reports ledgers
  unexplained,    // the rest of a process that reports ledgers, if its kinds can't be read
  unattributed,   // the rest of any other process, if its kinds can't be read, or before they are
  first_kind,
  count = static_cast<uint8_t>(first_kind) + static_cast<uint8_t>(MemoryKind::count)
};
constexpr size_t kWatchOwners = static_cast<size_t>(WatchOwner::count);
constexpr size_t kCopiesSinceFork = static_cast<size_t>(WatchOwner::copies_since_fork);
constexpr size_t kUnattributed = static_cast<size_t>(WatchOwner::unattributed);
constexpr size_t owner_of(MemoryKind kind) noexcept {
  return static_cast<size_t>(WatchOwner::first_kind) + static_cast<size_t>(kind);
}
std::string_view watch_owner_name(size_t owner) noexcept;  // "shards", "copies_since_fork"

// The memory of one process by owner. In KiB, the unit of the kernel's counts, so that records stay
// small.
struct OwnedMemory {
  std::array<uint32_t, kWatchOwners> kib{};

  uint64_t bytes(size_t owner) const noexcept { return kib[owner] * kKiB; }
  uint64_t total_bytes() const noexcept;
  // The owner that has grown most since `before`, or has shrunk least; the first of equal ones.
  size_t grown_since(const OwnedMemory& before) const noexcept;
  OwnedMemory& operator+=(const OwnedMemory& other) noexcept;
  bool operator==(const OwnedMemory&) const = default;
};

struct WatchedProcess {
  int pid = 0;
  int parent = 0;
  std::string name;                  // of the last program that it has run (exec)
  std::optional<int> rank;           // from its own report, else from its environment
  std::string_view rank_variable;    // the variable that gave the rank, as "RANK"; empty: none
  double begin_s = 0;                // when it was first seen
  double end_s = 0;                  // when it was last seen
  uint64_t peak_bytes = 0;           // its own highest Pss_Anon + Pss_Shmem
  uint64_t held_at_peak_bytes = 0;   // what it held when the tree held most
  uint64_t files_at_peak_bytes = 0;  // the page cache that it mapped then
  // In pages that were copied since it was forked (ForkCopies), when the tree had most such pages.
  uint64_t cow_duplicate_bytes = 0;
  int forked_from = 0;          // a pid; 0 if `cow_duplicate_bytes` is 0
  uint64_t peak_rss_bytes = 0;  // VmHWM: misses no peak, and counts mapped files
  // The most that was in huge pages at a time when its Pss was read; nullopt if Pss never was read.
  std::optional<uint64_t> huge_page_bytes;
};

// One reading of all processes of the tree.
struct WatchSample {
  struct Share {
    uint32_t process = 0;  // index of its WatchedProcess
    uint64_t bytes = 0;    // of all owners
    OwnedMemory owned;
  };
  double at_s = 0;
  uint64_t held_bytes = 0;           // by the tree: the sum of `shares` and `others`
  uint64_t unread_copies_bytes = 0;  // what it holds in addition at most, by page faults: copies of
                                     // pages shared since a fork, made since Pss was last read; of
                                     // a large process whose Pss was never read, its RssAnon
  uint64_t page_cache_bytes = 0;     // mapped by the tree; with --limit, charged to the cgroup
  uint64_t charged_bytes = 0;        // with --limit: all memory charged to the command's cgroup
  std::vector<Share> shares;         // the largest first
  OwnedMemory others;                // of the processes without a share, and `by_group_bytes`
  uint64_t by_group_bytes = 0;       // in held_bytes: what only the cgroup of --limit counts, since
                                     // Pss is not read: mostly copies of pages shared since a fork
};

// A phase that a process has reported.
struct WatchedPhase {
  int pid = 0;
  std::optional<int> rank;  // in the process's report, else that of its WatchedProcess
  std::string name;
  double begin_s = 0;
  double end_s = 0;
  std::optional<uint64_t> promised_bytes;  // without page tables and copies after a fork

  bool has(double at_s) const noexcept { return begin_s <= at_s && at_s <= end_s; }
};

// An OOM kill.
struct WatchedKill {
  int pid = 0;
  std::string name;
  std::optional<int> rank;
  int signal = 9;
  double at_s = 0;
  uint64_t limit_bytes = 0;          // --limit, else the limit with the least memory left
  std::string limit_source;          // "--limit", or as MemoryLimit::source
  uint64_t held_bytes = 0;           // by the killed process: see TreeSampler::add_kill
  uint64_t tree_held_bytes = 0;      // by the tree: last sampled, with `held_bytes`
  uint64_t unread_copies_bytes = 0;  // WatchSample's, when the process last held memory
  uint64_t by_group_bytes = 0;       // WatchSample's, in tree_held_bytes
  uint64_t page_cache_bytes = 0;     // as in the last sample
  std::string phase;                 // of the killed process; empty: it has reported none
  int grew_pid = 0;                  // the process that grew most before the kill; 0: none grew
  std::string grew_name;
  std::string grew_owner;  // the owner whose memory grew most; empty: it reports no ledgers
  uint64_t grew_bytes = 0;
  double grew_s = 0;  // the time in which it grew by grew_bytes
  // The sum of the processes' promises for their phases, with page tables. A process without a
  // promise counts with the memory that it held. 0 if the killed process had no promise.
  uint64_t promised_bytes = 0;
};

// Whether a bound exceeds a peak by more than 4 MiB and more than 1/32 of it.
bool may_be_missed(uint64_t peak_bytes, uint64_t at_most_bytes) noexcept;

struct WatchRecord {
  std::vector<std::string> command;
  int exit_code = 0;  // 128 + signal, if a signal has ended the command
  double elapsed_s = 0;
  uint64_t peak_bytes = 0;  // highest sum over the tree of Pss_Anon + Pss_Shmem
  double peak_at_s = 0;
  // The most that the tree may have held: between two samples by the processes' VmHWM, with copies
  // of shared pages by page faults.
  uint64_t peak_at_most_bytes = 0;
  bool is_at_most_by_copies = false;          // peak_at_most_bytes counts page faults, not VmHWM
  uint64_t cow_duplicate_bytes = 0;           // highest sum over the tree
  std::vector<WatchedProcess> processes;      // in the order in which they were first seen
  uint64_t processes_left_out = 0;            // how many small ones are not in `processes`
  std::vector<WatchSample> samples;           // a part, with that of the peak (see Timeline)
  std::vector<WatchedPhase> phases;           // sorted by begin
  std::optional<MemoryPressure> pressure;     // while the command ran
  std::optional<uint64_t> limit_bytes;        // --limit
  std::string limit_text;                     // its words
  std::optional<uint64_t> group_limit_bytes;  // the lowest limit of the watcher's cgroups
  std::optional<uint64_t> budget_bytes;       // the largest that a process has reported
  std::optional<WatchedKill> killed;
  int left_running = 0;             // processes that had not ended with the command
  double cpu_s = 0;                 // CPU time of the watching process
  uint64_t watcher_peak_bytes = 0;  // the most memory that the watching process held

  // Whether the peak may exceed `peak_bytes` by an amount that matters. After a kill it does not:
  // at the limit the kernel's log has what the killed process held.
  bool may_have_missed_peak() const noexcept;
  // The sample in which the tree held most; null without samples.
  const WatchSample* peak() const noexcept;
  // The innermost phase of a process at `at_s`: the one that began last. Null if there is none.
  const WatchedPhase* phase_at(int pid, double at_s) const noexcept;
  // The phase of a process that ended last before `at_s`. Null if there is none.
  const WatchedPhase* phase_before(int pid, double at_s) const noexcept;
};

}  // namespace modicum
