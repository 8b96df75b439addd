// Local ranks and who watches them.
#pragma once

#include <functional>
#include <string>

#include "modicum/ranks/board.h"

namespace modicum {

// More ranks than this for each usable core are a crowd: they run at the lowest priority, so that
// the launcher still hears signals and the machine can be used, and are killed without being given
// time to stop by themselves.
constexpr int kMaxRanksPerCore = 16;

struct SuperviseOptions {
  // A rank without a heartbeat for this long, and outside a barrier, is suspected; it has stalled
  // when its memory has not changed either by the next check.
  int64_t stall_limit_ns = 60 * kNsPerSecond;
  // A stop (SIGSTOP) shorter than this is nothing.
  int64_t stop_grace_ns = 2 * kNsPerSecond;
  // Called every 100 ms or so while ranks run.
  std::function<void()> tick = [] {};
  // Says whether the kernel has killed for lack of memory since the ranks began, and how it knows;
  // empty where not.
  std::function<std::string()> out_of_memory = [] { return std::string(); };
};

// Forks `board.ranks()` processes named modicum-rank-R, runs `body(rank)` in each, and returns when
// all have ended well. A rank ends well when `body` returns; what it throws goes to the board.
//
// Fails with the first failure, after every rank has been ended and reaped (within about 4 s of the
// fault): what a rank threw (with `rank` set); PEER for one that died, left early or is stopped;
// NOMEM where the kernel killed it for memory; STALL; CANCELLED or PREEMPTED where this process is
// told to stop (SIGINT, SIGTERM), also when ranks have received the same signal. No rank begins
// before all have been started. Ranks die with this process. To be called from a process without
// other threads; the signal handlers for SIGINT and SIGTERM are this function's while it runs.
void run_ranks(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
               const SuperviseOptions& options = {});

}  // namespace modicum
