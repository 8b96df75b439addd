// The worker threads of one rank. Internal to `stream`.
#pragma once

#include "modicum/base/base.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// run_workers that reports the first failure to the board at once, which cancels this rank's other
// workers and the other ranks. Throws this first failure, not one that the report has caused: it is
// stored before it is reported.
void run_rank_workers(Board& board, int rank, int count, FunctionRef<void(int worker)> work);

}  // namespace modicum
