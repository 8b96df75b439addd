// What all kinds of rank processes share. Part of the door of `training`.
#pragma once

#include <cstdint>

#include "modicum/ranks/ranks.h"

namespace modicum {

// Called every 100 ms or so with the bytes that all ranks together have done.
using ShowBytes = FunctionRef<void(uint64_t bytes)>;

// run_ranks, showing progress and telling a kill by the kernel for lack of memory.
void run_watched(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
                 ShowBytes show);

}  // namespace modicum
