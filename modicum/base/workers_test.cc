#include "modicum/base/workers.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <set>
#include <string>
#include <thread>

#include "modicum/base/clock_double.h"
#include "modicum/base/error.h"
#include "modicum/base/sanitizers_double.h"
#include "modicum/base/threads_double.h"

namespace modicum {
namespace {

TEST(RunWorkers, CallsEveryWorkerOnItsOwnThread) {
  std::array<std::thread::id, 5> threads;
  run_workers(
      5, [&](int worker) { threads[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
  const std::set<std::thread::id> distinct(threads.begin(), threads.end());
  EXPECT_EQ(distinct.size(), 5U);
  EXPECT_EQ(distinct.count(std::thread::id()), 0U);
  EXPECT_EQ(threads[4], std::this_thread::get_id())
      << "the last worker runs on the caller's thread";
}

// A rank that is bound to a NUMA node (numactl) keeps its threads there.
TEST(RunWorkers, ThreadsRunOnTheCallersCpus) {
  if (usable_cpus() < 2) GTEST_SKIP() << "one CPU";
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t cpu;
  CPU_ZERO(&cpu);
  CPU_SET(sched_getcpu(), &cpu);
  ASSERT_EQ(sched_setaffinity(0, sizeof cpu, &cpu), 0);
  std::array<cpu_set_t, 4> affinity_of{};
  run_workers(4, [&](int worker) {
    sched_getaffinity(0, sizeof(cpu_set_t), &affinity_of[static_cast<size_t>(worker)]);
  });
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  for (const cpu_set_t& cpus : affinity_of) EXPECT_TRUE(CPU_EQUAL(&cpus, &cpu));
}

TEST(RunWorkers, OneWorkerNeedsNoThread) {
  std::thread::id thread;
  run_workers(1, [&](int) { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST(RunWorkers, AnExceptionReachesTheCallerAfterAllHaveRun) {
  for (int bad = 0; bad < 3; ++bad) {
    std::atomic<int> ran = 0;
    try {
      run_workers(3, [&](int worker) {
        ++ran;
        if (worker == bad) fail(Category::io, "worker " + std::to_string(worker));
      });
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.what_happened(), "worker " + std::to_string(bad));
      EXPECT_EQ(ran, 3);
    }
  }
}

// Four workers need three new threads. If only 0, 1 or 2 can be started, no worker may run.
TEST(RunWorkers, RunsEveryWorkerOrNone) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers replace pthread_create";
  for (int can_start = 0; can_start <= 3; ++can_start) {
    std::atomic<int> ran = 0;
    const ThreadLimit limit(can_start);
    try {
      run_workers(4, [&](int) { ++ran; });
      EXPECT_EQ(can_start, 3);
      EXPECT_EQ(ran, 4);
    } catch (const Error& error) {
      EXPECT_LT(can_start, 3);
      EXPECT_EQ(error.category(), Category::no_memory);
      EXPECT_EQ(error.facts().got, std::to_string(can_start));
      EXPECT_EQ(ran, 0) << can_start;
    }
  }
}

TEST(RunWorkers, ZeroWorkersFailAnAssertion) {
  EXPECT_THROW(run_workers(0, [](int) {}), Error);
}

TEST(UsableCpus, IsAtLeastOne) { EXPECT_GE(usable_cpus(), 1); }

TEST(Clock, TheFakeClockMovesOnlyWhenTold) {
  FakeClock clock;
  EXPECT_EQ(clock.now_ns(), 0);
  clock.sleep_ns(5);
  clock.advance_ns(kNsPerSecond);
  EXPECT_EQ(clock.now_ns(), kNsPerSecond + 5);
}

TEST(Clock, TheSteadyClockNeverGoesBack) {
  SteadyClock clock;
  const int64_t before = clock.now_ns();
  clock.sleep_ns(kNsPerMs);
  EXPECT_GE(clock.now_ns() - before, kNsPerMs);
}

}  // namespace
}  // namespace modicum
