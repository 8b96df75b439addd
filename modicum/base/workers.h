// Runs one function on several threads and waits for all of them.
#pragma once

#include <exception>
#include <mutex>

#include "modicum/base/function_ref.h"

namespace modicum {

// Calls `work(worker)` for worker = 0 .. workers-1, each on a thread of its own but the last, which
// runs on the caller's. Returns when all are done. The first exception (by time) is thrown on the
// caller's thread; the others run to their end, so a worker that should stop early must be told by
// the caller's own means. A thread that can't be made is NOMEM, after those made have ended.
void run_workers(int workers, FunctionRef<void(int worker)> work);

// CPUs that this process may run on (its affinity), at least 1.
int usable_cpus();

}  // namespace modicum
