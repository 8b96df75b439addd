#include "modicum/base/workers.h"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "modicum/base/error.h"

namespace modicum {

void run_workers(int workers, const std::function<void(int worker)>& work) {
  MODICUM_ASSERT(workers >= 1);
  std::mutex mutex;
  std::exception_ptr first;
  auto guarded = [&](int worker) noexcept {
    try {
      work(worker);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  bool out_of_threads = false;
  try {
    threads.reserve(static_cast<size_t>(workers) - 1);
    for (int worker = 0; worker + 1 < workers; ++worker) threads.emplace_back(guarded, worker);
  } catch (const std::system_error&) {
    out_of_threads = true;
  }
  if (!out_of_threads) guarded(workers - 1);
  for (std::thread& thread : threads) thread.join();
  if (out_of_threads) fail(Category::no_memory, "a worker thread could not be started");
  if (first) std::rethrow_exception(first);
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace modicum
