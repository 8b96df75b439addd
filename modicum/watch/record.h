// What is known about a watched command after it has ended. Values; bytes, and seconds since the
// command was started. Part of the door of `watch`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/memory/memory.h"

namespace modicum {

// The owners of a process's memory: the purposes of its ledgers, if it reports any, in their order;
// then these.
enum class WatchOwner : uint8_t {
  copies_since_fork = static_cast<uint8_t>(Purpose::count),
  retained_heap,  // of freed blocks, by malloc; in a process with a ledger
  unexplained,    // in a process with a ledger: all the rest
  held,           // by a process that reports no ledger
  count
};
constexpr size_t kWatchOwners = static_cast<size_t>(WatchOwner::count);
std::string_view watch_owner_name(size_t owner) noexcept;  // "shards", "copies_since_fork"

// The memory of one process by owner, in KiB as the kernel counts it: records stay small.
struct OwnedMemory {
  std::array<uint32_t, kWatchOwners> kib{};

  uint64_t bytes(size_t owner) const noexcept { return kib[owner] * kKiB; }
  uint64_t total_bytes() const noexcept;
  // The owner of which there is most more than in `before`; the first if there is none.
  size_t grown_since(const OwnedMemory& before) const noexcept;
  OwnedMemory& operator+=(const OwnedMemory& other) noexcept;
  bool operator==(const OwnedMemory&) const = default;
};

struct WatchedProcess {
  int pid = 0;
  int parent = 0;
  std::string name;                 // the last one that it had
  std::optional<int> rank;          // from its environment, or its own report
  std::string_view rank_variable;   // that its environment has; empty: none
  double begin_s = 0;               // when it was first seen
  double end_s = 0;                 // when it was last seen
  uint64_t peak_bytes = 0;          // Pss_Anon + Pss_Shmem at its own highest
  uint64_t held_at_peak_bytes = 0;  // when the tree held most
  // Pages kept or written since a fork next to those of the process it was forked from, when the
  // tree had most of them (ForkCopies).
  uint64_t cow_duplicate_bytes = 0;
  int forked_from = 0;          // its pid, if it had copies; else 0
  uint64_t peak_rss_bytes = 0;  // VmHWM: misses no peak, and counts mapped files
};

// One reading of all processes of the tree.
struct WatchSample {
  struct Share {
    uint32_t process = 0;  // index of its WatchedProcess
    uint64_t bytes = 0;    // of all owners
    OwnedMemory owned;
  };
  double at_s = 0;
  uint64_t held_bytes = 0;        // by the tree: the sum of the shares and of `others`
  uint64_t page_cache_bytes = 0;  // mapped by the tree, or all that its own cgroup is charged for
  uint64_t charged_bytes = 0;     // to the command's cgroup, where it has one of its own
  std::vector<Share> shares;      // the largest first
  OwnedMemory others;             // smaller processes
};

// A phase that a process has reported.
struct WatchedPhase {
  int pid = 0;
  std::optional<int> rank;  // that it has reported, else of its process
  std::string name;
  double begin_s = 0;
  double end_s = 0;
  std::optional<uint64_t> promised_bytes;  // of the process, without page tables

  bool has(double at_s) const noexcept { return begin_s <= at_s && at_s <= end_s; }
};

// An OOM kill.
struct WatchedKill {
  int pid = 0;
  std::string name;
  std::optional<int> rank;
  int signal = 9;
  double at_s = 0;
  uint64_t limit_bytes = 0;
  std::string limit_source;       // "--limit", or as MemoryLimit::source
  uint64_t held_bytes = 0;        // by the killed process, at the last reading before
  uint64_t tree_held_bytes = 0;   // by all processes together, then
  uint64_t page_cache_bytes = 0;  // charged to the same limit, then
  std::string phase;              // of the killed process; empty: it has reported none
  int grew_pid = 0;               // the process that grew most before
  std::string grew_name;
  std::string grew_owner;  // which of its memory grew most; empty: it has reported no ledger
  uint64_t grew_bytes = 0;
  double grew_s = 0;  // within this time
  // What the processes had promised for their phases; 0 unless the killed one had.
  uint64_t promised_bytes = 0;
};

struct WatchRecord {
  std::vector<std::string> command;
  int exit_code = 0;  // 128 + signal, if it died of one
  double elapsed_s = 0;
  uint64_t peak_bytes = 0;  // highest sum over the tree of Pss_Anon + Pss_Shmem
  double peak_at_s = 0;
  // What the tree may have held between two samples: VmHWM counts memory that came and went there.
  uint64_t peak_at_most_bytes = 0;
  uint64_t cow_duplicate_bytes = 0;           // highest sum over the tree
  std::vector<WatchedProcess> processes;      // in the order in which they were first seen
  uint64_t processes_left_out = 0;            // small ones of which there were too many
  std::vector<WatchSample> samples;           // thinned; one of them is that of the peak
  std::vector<WatchedPhase> phases;           // in the order of their begins
  std::optional<uint64_t> limit_bytes;        // --limit
  std::optional<uint64_t> group_limit_bytes;  // the lowest of the cgroups around the command
  std::optional<uint64_t> budget_bytes;       // that a process has reported
  std::optional<WatchedKill> killed;
  int left_running = 0;             // processes that had not ended with the command
  double cpu_s = 0;                 // what watching has cost
  uint64_t watcher_peak_bytes = 0;  // held by the watching process itself

  // Whether the peak may have been higher than any sample by more than 1/32 and 4 MiB.
  bool may_have_missed_peak() const noexcept;
  // The sample in which the tree held most; null without one.
  const WatchSample* peak() const noexcept;
  // The innermost phase of a process at a time: the one that began last. Null without one.
  const WatchedPhase* phase_at(int pid, double at_s) const noexcept;
  // The one that ended last before that time. Null without one.
  const WatchedPhase* phase_before(int pid, double at_s) const noexcept;
};

}  // namespace modicum
