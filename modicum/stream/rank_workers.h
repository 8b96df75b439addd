// The worker threads of one rank. Internal to `stream`.
#pragma once

#include "modicum/base/base.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

class Sink;
struct RankContext;

// Throws USAGE unless the context has a ledger and a board for all ranks of the plan, and its rank
// is one of the plan's and the sink's.
void check_context(const RankContext& at, const Plan& plan, const Sink& sink);

// Calls run_workers. If a worker fails, reports the failure to the board immediately; this rank's
// other workers and the other ranks then end with PEER. Throws the failure that came first. This is
// never one of those PEER errors, since a failure is stored before it is reported.
void run_rank_workers(Board& board, int rank, int count, FunctionRef<void(int worker)> work);

}  // namespace modicum
