// Runs a function on several threads.
#pragma once

#include <exception>
#include <mutex>

#include "modicum/base/function_ref.h"

namespace modicum {

// Calls `work(worker)` for worker = 0 .. workers-1 and waits for all of these calls. The last
// worker runs on the caller's thread, each other one on a new thread. If workers throw, rethrows
// the exception that was thrown first; the other workers are not cancelled. Throws NOMEM if a
// thread can't be started; then no worker has run.
void run_workers(int workers, FunctionRef<void(int worker)> work);

// The number of CPUs in this process's affinity mask, at least 1.
int usable_cpus();

}  // namespace modicum
