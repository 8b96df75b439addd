#include "modicum/watch/deaths.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

// Statuses of wait(2).
constexpr int kExited = 0;
constexpr int kKilled = SIGKILL;

// Without the kernel's log, only the count of kills is known.
TEST(Deaths, TheKilledProcessIsTheFirstToEndAfterTheCountHasGrown) {
  const TempDir directory;
  const auto count = [&](int kills) {
    std::ofstream(directory / "memory.oom_control") << "under_oom 0\noom_kill " << kills << "\n";
  };
  count(2);
  SteadyClock clock;
  const TreeSampler sampler(clock, {.root_pid = getpid(), .cpu_ns = [] { return int64_t{0}; }});
  Deaths deaths(MemoryCgroup{.version = 1, .name = "/", .directory = directory.path()});
  const std::map<int, int> statuses = {{11, kExited}, {12, kKilled}};
  EXPECT_FALSE(deaths.has_new_kill());
  EXPECT_EQ(deaths.killed_of({12}, statuses, sampler), std::nullopt) << "killed by a program";
  count(3);
  EXPECT_TRUE(deaths.has_new_kill());
  EXPECT_EQ(deaths.killed_of({11}, statuses, sampler), std::nullopt) << "it has exited";
  EXPECT_EQ(deaths.killed_of({11, 12}, statuses, sampler), 12);
  EXPECT_FALSE(deaths.has_new_kill());
}

// Another job in the command's cgroup was killed: no later end of a process is that kill.
TEST(Deaths, AKillThatNoEndExplainsIsForgotten) {
  const TempDir directory;
  const auto count = [&](int kills) {
    std::ofstream(directory / "memory.oom_control") << "oom_kill " << kills << "\n";
  };
  count(2);
  Deaths deaths(MemoryCgroup{.version = 1, .name = "/", .directory = directory.path()});
  count(3);
  deaths.forget_old(7 * kNsPerSecond, false);
  deaths.forget_old(11 * kNsPerSecond, false);
  EXPECT_EQ(deaths.new_kills(), 1U);
  count(4);
  deaths.forget_old(12 * kNsPerSecond, false);
  deaths.forget_old(16 * kNsPerSecond, true);  // frees its memory
  deaths.forget_old(20 * kNsPerSecond, false);
  EXPECT_EQ(deaths.new_kills(), 2U);
  deaths.forget_old(21 * kNsPerSecond, false);
  EXPECT_FALSE(deaths.has_new_kill());
  count(5);
  EXPECT_TRUE(deaths.has_new_kill());
  deaths.forget();
  EXPECT_FALSE(deaths.has_new_kill());
}

// Without a free descriptor nothing of /proc can be read, and no sample taken.
TEST(Deaths, LeaveFileDescriptorsFree) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest = dup(STDERR_FILENO);  // those below are in use
  close(lowest);
  rlimit lower = before;
  lower.rlim_cur = static_cast<rlim_t>(lowest + Deaths::kFreeDescriptors + 3);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
  std::vector<pid_t> children;
  std::vector<pollfd> waited;
  {
    for (int i = 0; i < 8; ++i) {
      children.push_back(fork());
      if (children.back() == 0) {
        pause();
        _exit(0);
      }
    }
    Deaths deaths(std::nullopt);
    deaths.follow(children);
    deaths.add_to(waited);
  }
  setrlimit(RLIMIT_NOFILE, &before);
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  EXPECT_EQ(waited.size(), 4U);
}

}  // namespace
}  // namespace modicum
