// What is known about a watched command after it has ended. Values; bytes, and seconds since the
// command was started. Part of the door of `watch`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace modicum {

struct WatchedProcess {
  int pid = 0;
  int parent = 0;
  std::string name;                 // the last one that it had
  std::optional<int> rank;          // from its environment
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
  int grew_pid = 0;               // the process that grew most before
  std::string grew_name;
  uint64_t grew_bytes = 0;
  double grew_s = 0;  // within this time
};

struct WatchRecord {
  std::vector<std::string> command;
  int exit_code = 0;  // 128 + signal, if it died of one
  double elapsed_s = 0;
  uint64_t peak_bytes = 0;  // highest sum over the tree of Pss_Anon + Pss_Shmem
  double peak_at_s = 0;
  uint64_t cow_duplicate_bytes = 0;       // highest sum over the tree
  std::vector<WatchedProcess> processes;  // in the order in which they were first seen
  uint64_t processes_left_out = 0;        // small ones of which there were too many
  std::optional<uint64_t> limit_bytes;
  std::optional<WatchedKill> killed;
  int left_running = 0;             // processes that had not ended with the command
  double cpu_s = 0;                 // what watching has cost
  uint64_t watcher_peak_bytes = 0;  // held by the watching process itself
};

}  // namespace modicum
