#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "modicum/base/sanitizers_double.h"
#include "modicum/probe/machine_double.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

using std::string_literals::operator""s;

// Must fail if the name is read from another line, or a zombie counts as alive.
TEST(Status, HasTheMemoryOfOneProcess) {
  Machine machine;
  machine.put("/proc/7/status",
              "Name:\tpython 3 (x)\nState:\tS (sleeping)\nPPid:\t6\nVmLck:\t  4 kB\n"
              "VmHWM:\t  90 kB\nVmRSS:\t  70 kB\nRssAnon:\t  40 kB\nRssFile:\t  20 kB\n"
              "RssShmem:\t  10 kB\nVmPTE:\t  8 kB\n");
  machine.put("/proc/8/status", "Name:\tgone\nState:\tZ (zombie)\nPPid:\t7\n");
  const auto status = read_status(7, machine.root());
  ASSERT_TRUE(status);
  EXPECT_EQ(status->name, "python 3 (x)");
  EXPECT_EQ(status->parent, 6);
  EXPECT_TRUE(status->is_alive);
  EXPECT_EQ(status->rss_anon, 40 * kKiB);
  EXPECT_EQ(status->rss_file, 20 * kKiB);
  EXPECT_EQ(status->rss_shmem, 10 * kKiB);
  EXPECT_EQ(status->peak_rss, 90 * kKiB);
  EXPECT_EQ(status->page_tables, 8 * kKiB);
  EXPECT_EQ(status->locked, 4 * kKiB);
  EXPECT_FALSE(read_status(8, machine.root())->is_alive);
  EXPECT_EQ(read_status(9, machine.root()), std::nullopt);
}

// Must fail if a process counts as a zombie whose main thread has ended (pthread_exit).
TEST(Status, OfAProcessWhoseMainThreadHasEndedIsThatOfAnotherThread) {
  Machine machine;
  const std::string_view zombie = "Name:\tmain\nState:\tZ (zombie)\nPPid:\t6\n";
  for (const char* const path : {"/proc/7/status", "/proc/7/task/7/status"}) {
    machine.put(path, zombie);
  }
  EXPECT_FALSE(read_status(7, machine.root())->is_alive);
  machine.put("/proc/7/task/9/status",
              "Name:\tother\nState:\tS (sleeping)\nPPid:\t6\nRssAnon:\t  40 kB\n");
  const auto status = read_status(7, machine.root());
  EXPECT_TRUE(status->is_alive);
  EXPECT_EQ(status->name, "main");
  EXPECT_EQ(status->rss_anon, 40 * kKiB);
}

TEST(Status, AChildInItsParentsMemoryHasEqualFigures) {
  Machine machine;
  const auto put = [&](int pid, int parent, int file_kib) {
    machine.put(fmt::format("/proc/{}/status", pid),
                fmt::format("Name:\ta\nState:\tS\nPPid:\t{}\nVmHWM:\t90 kB\nRssAnon:\t40 kB\n"
                            "RssFile:\t{} kB\nVmPTE:\t8 kB\n",
                            parent, file_kib));
  };
  put(7, 6, 20);
  put(8, 7, 20);
  put(9, 7, 16);
  EXPECT_FALSE(is_in_parents_memory(7, machine.root())) << "its parent is not shown";
  EXPECT_TRUE(is_in_parents_memory(8, machine.root()));
  EXPECT_FALSE(is_in_parents_memory(9, machine.root()));
  EXPECT_FALSE(is_in_parents_memory(10, machine.root()));
}

TEST(Status, PssIsOfPrivateAndSharedMemoryWithoutFiles) {
  Machine machine;
  machine.put("/proc/7/smaps_rollup",
              "Rss: 90 kB\nPss: 60 kB\nPss_Anon: 20 kB\nPss_File: 30 kB\nPss_Shmem: 10 kB\n");
  machine.put("/proc/8/smaps_rollup", "Rss: 90 kB\nPss: 60 kB\n");
  EXPECT_EQ(read_pss(7, machine.root()), 30 * kKiB);
  EXPECT_EQ(read_pss(8, machine.root()), std::nullopt);
}

// Must fail if huge pages of shared memory are not counted.
TEST(Status, HugePagesAreOfPrivateAndSharedMemory) {
  Machine machine;
  machine.put("/proc/7/smaps_rollup",
              "Rss: 9000 kB\nPss_Anon: 20 kB\nAnonHugePages: 4096 kB\nShmemPmdMapped: 2048 kB\n");
  EXPECT_EQ(read_mapping_sums(7, machine.root())->huge_pages, 6 * kMiB);
  EXPECT_EQ(read_mapping_sums(8, machine.root()), std::nullopt);
}

// Must fail if LOCAL_RANK is preferred, or a variable counts whose name only begins with RANK.
TEST(Status, RanksComeFromTheLaunchersVariables) {
  Machine machine;
  machine.put("/proc/1/environ", "LOCAL_RANK=1\0RANK_=9\0RANK=5\0"s);
  machine.put("/proc/2/environ", "RANK=none\0OMPI_COMM_WORLD_RANK=3\0"s);
  machine.put("/proc/3/environ", "MYRANK=3\0RANKS=4\0"s);
  machine.put("/proc/4/environ", "LOCAL_RANK=2\0"s);
  EXPECT_EQ(rank_of(1, machine.root())->rank, 5);
  EXPECT_EQ(rank_of(2, machine.root())->rank, 3);
  EXPECT_EQ(rank_of(3, machine.root()), GivenRank());
  machine.put("/proc/5/environ", "");
  EXPECT_EQ(rank_of(5, machine.root()), std::nullopt);
  EXPECT_EQ(rank_of(6, machine.root()), std::nullopt);
  EXPECT_EQ(rank_of(4, machine.root()), (GivenRank{2, "LOCAL_RANK"}));
}

// Must fail if only the main thread's list of children is read.
TEST(Status, ChildrenAreThoseOfAllThreads) {
  Machine machine;
  machine.put("/proc/7/task/7/children", "12 11 ");
  machine.put("/proc/7/task/8/children", "10 ");
  machine.put("/proc/loadavg", "0.1 0.2 0.3 1/200 4321\n");
  EXPECT_EQ(children_of(7, machine.root()), (std::vector<int>{10, 11, 12}));
  EXPECT_EQ(children_of(99, machine.root()), (std::vector<int>{}));
  EXPECT_EQ(last_pid(machine.root()), 4321U);
}

TEST(Status, FieldsOfStatAreCountedFromTheEndOfTheName) {
  Machine machine;
  machine.put("/proc/7/stat", "7 (a) 5 b) S 1 2 3 4 -1 6 77 8 9 10\n");
  EXPECT_EQ(read_minor_faults(7, machine.root()), 77U);
  EXPECT_EQ(read_wait_status(7, machine.root()), std::nullopt);
  std::string fields;
  for (int field = 4; field < 52; ++field) fields += "1 ";
  machine.put("/proc/8/stat", "8 (a) 5 b) Z " + fields + "9\n");
  machine.put("/proc/9/stat", "9 (a) Z b) S " + fields + "9\n");
  EXPECT_EQ(read_wait_status(8, machine.root()), 9);
  EXPECT_EQ(read_wait_status(9, machine.root()), std::nullopt);
}

// Must fail if the v2 chain follows the v1 chain, or counters of the other version are read.
TEST(MemoryCgroups, AreTheChainThatHasTheController) {
  Machine machine;
  machine.put("/proc/self/cgroup", "3:memory:/a/b\n0::/u\n");
  machine.put("/proc/self/mountinfo",
              "30 20 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
              "31 20 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  machine.put_v1("/a/b", "100", 7000, 100, 200);
  machine.put("/sys/fs/cgroup/memory/a/b/memory.oom_control", "under_oom 0\noom_kill 3\n");
  const auto groups = memory_cgroups(machine.root());
  ASSERT_EQ(groups.size(), 3U);
  EXPECT_EQ(groups[0].name, "/a/b");
  EXPECT_EQ(groups[2].name, "/");
  EXPECT_EQ(charged_to(groups[0]), 7000U);
  EXPECT_EQ(memory_charges(groups[0])->page_cache_bytes, 300U);
  EXPECT_EQ(oom_kills_in(groups[0]), 3U);
}

// Must fail if "full" is read as "some", or the node's pressure as the cgroup's.
TEST(Pressure, IsThatOfTheNearestCgroupElseOfTheNode) {
  Machine machine;
  EXPECT_EQ(memory_pressure({}, machine.root()), std::nullopt);
  machine.put("/proc/pressure/memory",
              "some avg10=1.50 avg60=0.29 avg300=0.59 total=16406656\n"
              "full avg10=0.00 avg60=0.16 avg300=0.33 total=5310287\n");
  const MemoryPressure of_node{"node", 16'406'656, 5'310'287};
  const std::string mount = machine.root() + "/sys/fs/cgroup";
  const std::vector<MemoryCgroup> groups = {{2, "/a/b", mount + "/a/b"}, {2, "/a", mount + "/a"}};
  EXPECT_EQ(memory_pressure(groups, machine.root()), of_node);
  machine.put("/sys/fs/cgroup/a/memory.pressure", "some avg10=0.00 total=7\nfull total=3\n");
  EXPECT_EQ(memory_pressure(groups, machine.root()), (MemoryPressure{"cgroup v2 /a", 7, 3}));
}

// Must fail if a maximum from before construction is returned: another run may have reached it.
TEST(CgroupPeak, IsOfTheTimeSinceItWasMade) {
  for (const int version : {1, 2}) {
    Machine machine;
    const bool is_v1 = version == 1;
    machine.put("/proc/self/cgroup", is_v1 ? "3:memory:/a\n" : "0::/a\n");
    machine.put("/proc/self/mountinfo",
                is_v1 ? "30 20 0:30 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n"
                      : "30 20 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    const std::string file =
        is_v1 ? "/sys/fs/cgroup/a/memory.max_usage_in_bytes" : "/sys/fs/cgroup/a/memory.peak";
    EXPECT_EQ(CgroupPeak(machine.root()).bytes(), std::nullopt) << "no such file";
    machine.put(file, "7000\n");
    const CgroupPeak peak(machine.root());
    EXPECT_EQ(peak.bytes(), std::nullopt);
    machine.put(file, "7001\n");
    EXPECT_EQ(peak.bytes(), 7001U);
  }
}

TEST(ThisMachine, HasAStatusForEveryProcess) {
  const auto status = read_status(getpid());
  ASSERT_TRUE(status);
  EXPECT_EQ(status->parent, getppid());
  EXPECT_TRUE(status->is_alive);
  EXPECT_GT(status->rss_anon, 0U);
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own";
  EXPECT_NEAR(static_cast<double>(read_pss(getpid()).value_or(status->rss_anon)),
              static_cast<double>(status->rss_anon + status->rss_shmem), 2.0 * kMiB);
}

int wait_for_a_signal(void*) {
  while (true) syscall(SYS_pause);
}

// With kcmp where the kernel permits it, and by figures: kcmp is not used for another /proc.
TEST(ThisMachine, AChildIsInItsParentsMemoryUntilItsExec) {
  if (kIsSanitized) GTEST_SKIP() << "the child would run in the sanitizer's memory";
  // A stack each: `clone` writes to that of the second child while the first one runs.
  alignas(64) std::array<std::byte, 16 * kKiB> shared_stack, forked_stack;
  const int shared = clone(wait_for_a_signal, shared_stack.data() + shared_stack.size(),
                           CLONE_VM | SIGCHLD, nullptr);
  const int forked =
      clone(wait_for_a_signal, forked_stack.data() + forked_stack.size(), SIGCHLD, nullptr);
  for (const char* const root : {"", "/."}) {
    EXPECT_TRUE(is_in_parents_memory(shared, root));
    EXPECT_FALSE(is_in_parents_memory(forked, root));
  }
  EXPECT_EQ(read_process_memory(shared).held_bytes(), 0U);
  EXPECT_GT(read_process_memory(forked).held_bytes(), 0U);
  for (const TreeMemory::Process& process : read_tree(0, {}).processes) {
    EXPECT_EQ(process.is_forked, process.pid == forked);
    EXPECT_EQ(process.memory.held_bytes() == 0, process.pid == shared);
  }
  for (const ForkCopies& copies : read_fork_copies(0)) EXPECT_EQ(copies.pid, forked);
  for (const int pid : {shared, forked}) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

}  // namespace
}  // namespace modicum
