#include "modicum/watch/oom_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/probe/machine_double.h"

namespace modicum {
namespace {

// The messages are recorded from Linux 6.18 and 6.1.
TEST(OomLog, NamesTheKilledProcess) {
  const auto kill = oom_kill_in(
      "3,1830,8459183112,-;Memory cgroup out of memory: Killed process 5331 (python3) "
      "total-vm:630968kB, anon-rss:196352kB, file-rss:6676kB, shmem-rss:0kB, UID:0 pgtables:444kB "
      "oom_score_adj:0\n");
  ASSERT_TRUE(kill.has_value());
  EXPECT_EQ(kill->pid, 5331);
  EXPECT_EQ(kill->name, "python3");
  EXPECT_EQ(kill->held_bytes, 196352 * kKiB);
}

TEST(OomLog, CountsSharedMemoryAndKeepsOddNames) {
  const auto kill = oom_kill_in(
      "3,7,1,-;Out of memory: Killed process 12 (a (b) c) total-vm:10kB, anon-rss:3kB, "
      "file-rss:1kB, shmem-rss:4kB, UID:1000 pgtables:4kB oom_score_adj:0");
  ASSERT_TRUE(kill.has_value());
  EXPECT_EQ(kill->name, "a (b) c");
  EXPECT_EQ(kill->held_bytes, 7 * kKiB);
}

TEST(OomLog, NamesTheCgroupWhoseLimitWasReached) {
  const auto group = oom_group_in(
      "3,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
      "oom_memcg=/box/modicum-watch-5246,task_memcg=/box/modicum-watch-5246/a,task=python3,"
      "pid=5331,uid=0");
  EXPECT_EQ(group, "/box/modicum-watch-5246");
  EXPECT_EQ(oom_group_in("3,1,2,-;oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/a"),
            std::nullopt);
}

// In a container the pids of the log are those of other processes.
TEST(OomLog, IsReadInTheInitialPidNamespaceOnly) {
  for (const auto& [name, is_initial] :
       {std::pair("pid:[4026531836]", true), {"pid:[4026532441]", false}, {"", false}}) {
    Machine machine;
    machine.put("/dev/kmsg", "3,1,1,-;Killed process 7 (old) total-vm:1kB, anon-rss:1kB");
    machine.put("/proc/self/ns/mnt", "");
    if (*name != 0) std::filesystem::create_symlink(name, machine.root() + "/proc/self/ns/pid");
    OomLog log(machine.root());
    EXPECT_EQ(log.is_readable(), is_initial) << name;
    EXPECT_TRUE(log.next().empty()) << "logged before";
    std::ofstream(machine.root() + "/dev/kmsg", std::ios::app)
        << "\n3,2,2,-;Killed process 8 (new) total-vm:1kB, anon-rss:1kB";
    EXPECT_EQ(log.next().size(), is_initial ? 1U : 0U) << name;
  }
}

TEST(OomLog, OtherMessagesAreNoKills) {
  for (const char* const message :
       {"", "6,1,2,-;eth0: link up", "3,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,pid=5331,uid=0",
        "3,1,2,-;Killed process x (a) total-vm:1kB, anon-rss:1kB",
        "3,1,2,-;Killed process 5 total-vm:1kB, anon-rss:1kB"}) {
    EXPECT_FALSE(oom_kill_in(message).has_value()) << message;
  }
}

}  // namespace
}  // namespace modicum
