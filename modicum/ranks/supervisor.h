// Rank processes on this machine, forked and supervised by the launcher (this process).
#pragma once

#include <functional>
#include <string>

#include "modicum/ranks/board.h"

namespace modicum {

// If there are more ranks than this per usable core, they run at the lowest priority (SCHED_IDLE):
// the launcher still handles signals, and the machine stays usable. On failure they are killed
// immediately.
constexpr int kMaxRanksPerCore = 16;

struct SuperviseOptions {
  // After this long without a heartbeat, outside a barrier, a rank's memory size is checked. The
  // rank has stalled (STALL) if the size is the same as at its previous check; the first check
  // after a heartbeat only records it. If the rank is in a read or write of a file, the error names
  // the file and the offset.
  int64_t stall_limit_ns = 60 * kNsPerSecond;
  // A rank stopped (SIGSTOP) for less than this is tolerated.
  int64_t stop_grace_ns = 2 * kNsPerSecond;
  // Called about every 100 ms while ranks run. An exception ends the run.
  std::function<void()> tick = [] {};
  // Returns how long ranks may go on after the first SIGTERM to this process; called once, after
  // that signal. If it is set, ranks ignore SIGTERM. SIGINT ends the run immediately. So does
  // another SIGTERM, unless it arrives within a second of the first one: `timeout` and others send
  // two.
  std::function<int64_t()> grace_ns;
  // Returns the evidence that the kernel's OOM killer has acted since the ranks began, or "".
  std::function<std::string()> out_of_memory = [] { return std::string(); };
};

// Forks `board.ranks()` processes named modicum-rank-R (cut to the kernel's 15 characters). After
// all have been forked, runs `body(rank)` in each, and returns when every `body` has returned. The
// kernel kills the ranks if this process dies.
//
// On failure ends and reaps all ranks (within about 4 s) and throws the first failure:
//   an exception of a rank                   its Error, with `rank` set (NOMEM for std::bad_alloc,
//                                            INTERNAL for exceptions that are not an Error)
//   a rank died, exited early or is stopped  PEER
//   the kernel killed it for lack of memory  NOMEM
//   no heartbeat, no change of its memory    STALL
//   fork failed                              NOMEM
//   pipe2 failed                             IO
//   SIGINT or SIGTERM to this process        CANCELLED or PREEMPTED, also if ranks received it too;
//                                            after SIGTERM not before `grace_ns` has passed
//
// An exception of `options.tick` ends the ranks and is thrown, too. Threads: this process must have
// only the calling thread. During the call, it handles SIGINT and SIGTERM.
void run_ranks(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
               const SuperviseOptions& options = {});

// Where ranks live: run_ranks, or in tests threads of this process (thread_ranks_double.h).
using RankRunner = void (*)(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
                            const SuperviseOptions& options);

}  // namespace modicum
