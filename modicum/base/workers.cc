#include "modicum/base/workers.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "modicum/base/error.h"

namespace modicum {
namespace {

constexpr size_t kMostCpus = size_t{1} << 20;  // of a machine

}  // namespace

void run_workers(int workers, FunctionRef<void(int worker)> work) {
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
  // No worker begins before all threads exist: if one can't be started, no work has to be undone.
  enum Gate { closed, open, abandoned };
  std::atomic<Gate> gate = closed;
  auto behind_the_gate = [&](int worker) noexcept {
    gate.wait(closed);
    if (gate == open) guarded(worker);
  };
  std::vector<std::thread> threads;
  bool out_of_threads = false;
  try {
    threads.reserve(static_cast<size_t>(workers) - 1);
    for (int worker = 0; worker + 1 < workers; ++worker) {
      threads.emplace_back(behind_the_gate, worker);
    }
  } catch (const std::exception&) {  // std::system_error, or std::bad_alloc
    out_of_threads = true;
  }
  gate = out_of_threads ? abandoned : open;
  gate.notify_all();
  if (!out_of_threads) guarded(workers - 1);
  for (std::thread& thread : threads) thread.join();
  if (out_of_threads) {
    fail(Category::no_memory, "the worker threads could not all be started",
         {.expected = fmt::format("{} threads", workers - 1),
          .got = std::to_string(threads.size())});
  }
  if (first) std::rethrow_exception(first);
}

int usable_cpus() {
  // The kernel refuses a set (EINVAL) that has fewer bits than the machine may have CPUs.
  for (size_t cpus = CPU_SETSIZE; cpus <= kMostCpus; cpus *= 2) {
    std::vector<cpu_set_t> sets(CPU_ALLOC_SIZE(cpus) / sizeof(cpu_set_t));
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) == 0) {
      return std::max(1, CPU_COUNT_S(bytes, sets.data()));
    }
    if (errno != EINVAL) break;
  }
  return 1;
}

}  // namespace modicum
