// Runs a function on several threads.
#pragma once

#include <exception>
#include <mutex>

#include "modicum/base/function_ref.h"

namespace modicum {

// Calls `work(worker)` for worker = 0 .. workers-1, each on a thread of its own except the last,
// which runs on the caller's thread. On success returns when all have returned. On failure throws
// the first exception (by time) after all workers have ended; it does not cancel the others. NOMEM
// if a thread can't be started; then no worker has run.
void run_workers(int workers, FunctionRef<void(int worker)> work);

// The number of CPUs in this process's affinity mask, at least 1.
int usable_cpus();

}  // namespace modicum
