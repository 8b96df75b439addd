// The worker threads of one rank. Internal to `stream`.
#pragma once

#include "modicum/base/base.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// Calls run_workers, and reports a failure to the board at once, which cancels this rank's other
// workers and the other ranks. Throws the first failure. That is never a failure that the report
// has caused, since the first is stored before it is reported.
void run_rank_workers(Board& board, int rank, int count, FunctionRef<void(int worker)> work);

}  // namespace modicum
