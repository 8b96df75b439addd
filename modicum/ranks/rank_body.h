// The body of a rank, wherever it runs. Internal to `ranks`.
#pragma once

#include "modicum/ranks/board.h"

namespace modicum {

// Calls `body(rank)`. Marks the rank as done, or reports its exception on the board. Returns the
// rank's exit code.
int run_rank_body(SharedBoard& board, int rank, FunctionRef<void(int rank)> body) noexcept;

}  // namespace modicum
