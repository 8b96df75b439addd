// The worker threads of one rank. Internal to `stream`.
#pragma once

#include "modicum/base/base.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// run_workers, whose first failure is reported to the board at once. That cancels this rank's other
// workers and the other ranks. It is kept before it is reported, so that failures caused by the
// report come second, and it is the one that is thrown.
void run_rank_workers(Board& board, int rank, int count, FunctionRef<void(int worker)> work);

}  // namespace modicum
