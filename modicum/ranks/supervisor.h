// Rank processes on this machine, forked and supervised by the launcher.
#pragma once

#include <functional>
#include <string>

#include "modicum/ranks/board.h"

namespace modicum {

// If there are more ranks than this per usable core, they run at the lowest priority, so that the
// launcher still receives signals and the machine stays usable, and are killed without a grace
// period.
constexpr int kMaxRanksPerCore = 16;

struct SuperviseOptions {
  // A rank outside a barrier is suspected after this long without a heartbeat. It has stalled
  // (STALL) if its memory size is also unchanged after the same time again.
  int64_t stall_limit_ns = 60 * kNsPerSecond;
  // A rank stopped (SIGSTOP) for less than this is tolerated.
  int64_t stop_grace_ns = 2 * kNsPerSecond;
  // Called about every 100 ms while ranks run. An exception ends the run.
  std::function<void()> tick = [] {};
  // How long ranks may go on after the first SIGTERM to this process; called once, when it has
  // arrived. If set, ranks ignore SIGTERM. SIGINT ends the run immediately, and so does another
  // SIGTERM, but not within a second of the first, since `timeout` and others send two.
  std::function<int64_t()> grace_ns;
  // The evidence that the kernel's OOM killer has acted since the ranks began, or "".
  std::function<std::string()> out_of_memory = [] { return std::string(); };
};

// Forks `board.ranks()` processes named modicum-rank-R, runs `body(rank)` in each once all have
// been started, and returns when every `body` has returned. Ranks die with this process.
//
// On failure ends and reaps all ranks (within about 4 s) and throws the first failure:
//   an exception of a rank                   its Error, with `rank` set
//   a rank died, exited early or is stopped  PEER
//   the kernel killed it for lack of memory  NOMEM
//   no heartbeat, no change of its memory    STALL
//   SIGINT or SIGTERM to this process        CANCELLED or PREEMPTED, also if ranks received it too;
//                                            after SIGTERM not before `grace_ns` has passed
//
// Threads: this process must have no other; it handles SIGINT and SIGTERM while the call runs.
void run_ranks(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
               const SuperviseOptions& options = {});

}  // namespace modicum
