// Ranks as threads of this process, for tests that start no processes.
#pragma once

#include "modicum/ranks/supervisor.h"

namespace modicum {

// A RankRunner: runs `body(rank)` in a thread per rank, and calls `options.tick` meanwhile. On
// failure every other rank must end by itself, by a PEER of the board. Throws the first failure, as
// run_ranks does. Handles no signals, and notices no rank that stalls. The kernel's figures of a
// rank are those of the process.
void run_ranks_in_threads(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
                          const SuperviseOptions& options);

}  // namespace modicum
