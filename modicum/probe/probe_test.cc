#include "modicum/probe/probe.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "modicum/base/sanitizers_double.h"
#include "modicum/probe/kernel_text.h"
#include "modicum/probe/machine_double.h"

namespace modicum {
namespace {

constexpr std::string_view kV1Mount =
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
constexpr std::string_view kV2Mount =
    "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr std::string_view kV1NoLimit = "9223372036854771712\n";

// "source limit available; ...", for a single comparison.
std::string text_of(const std::vector<MemoryLimit>& limits) {
  std::string text;
  for (const MemoryLimit& limit : limits) {
    text += limit.source + " " + std::to_string(limit.limit_bytes) + " " +
            std::to_string(limit.available_bytes) + "; ";
  }
  return text;
}

TEST(MemoryLimits, WithoutCgroupsTheNodeIsTheLimit) {
  Machine machine;
  machine.put_node(1000, 600);
  EXPECT_EQ(text_of(memory_limits(machine.root())), "MemAvailable 1024000 614400; ");
}

TEST(MemoryLimits, AllNestedV1LimitsAreFound) {
  Machine machine;
  machine.put_node(100000, 90000);
  machine.put("/proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/a/b\n0::/\n");
  machine.put("/proc/self/mountinfo", std::string(kV2Mount) + std::string(kV1Mount));
  machine.put_v1("/a/b", "5000000\n", 1000000);
  machine.put_v1("/a", "6000000\n", 4500000, 300000, 200000);
  machine.put_v1("", kV1NoLimit, 9000000);
  EXPECT_EQ(text_of(memory_limits(machine.root())),
            "cgroup v1 /a 6000000 2000000; cgroup v1 /a/b 5000000 4000000; "
            "MemAvailable 102400000 92160000; ");
}

TEST(MemoryLimits, V2TakesTheLowerOfMaxAndHigh) {
  Machine machine;
  machine.put_node(100000, 90000);
  machine.put("/proc/self/cgroup", "0::/a/b/c/d\n");
  machine.put("/proc/self/mountinfo", kV2Mount);
  machine.put_v2("/a/b/c/d", {"max\n", "max\n", 1});
  machine.put_v2("/a/b/c", {"9000000\n", "5000000\n", 2000000, 500000, 400000});
  machine.put_v2("/a/b", {"max\n", "8000000\n", 1000000});
  machine.put_v2("/a", {"9000000\n", "max\n", 1000000});
  EXPECT_EQ(text_of(memory_limits(machine.root())),
            "cgroup v2 /a/b/c 5000000 3900000; cgroup v2 /a/b 8000000 7000000; "
            "cgroup v2 /a 9000000 8000000; MemAvailable 102400000 92160000; ");
}

TEST(MemoryLimits, UsageAndAvailableBytesAreClampedAtZero) {
  Machine machine;
  machine.put("/proc/self/cgroup", "0::/over/cache\n");
  machine.put("/proc/self/mountinfo", kV2Mount);
  machine.put_v2("/over/cache", {"1000\n", "max\n", 700, 900, 0});
  machine.put_v2("/over", {"1000\n", "max\n", 1700, 100, 0});
  EXPECT_EQ(text_of(memory_limits(machine.root())),
            "cgroup v2 /over 1000 0; cgroup v2 /over/cache 1000 1000; ");
}

TEST(MemoryLimits, UnreadableFilesOmitTheirLevelOrCountZero) {
  Machine machine;
  machine.put_node(1000, 600);
  machine.put("/proc/self/cgroup", "4:memory:/a/b/c\n");
  machine.put("/proc/self/mountinfo", kV1Mount);
  machine.put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "4096\n");
  machine.put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "nonsense\n");
  EXPECT_EQ(text_of(memory_limits(machine.root())),
            "cgroup v1 /a/b 4096 4096; MemAvailable 1024000 614400; ");
}

TEST(MemoryLimits, AContainerSeesItsOwnCgroupAtTheMountPoint) {
  Machine machine;
  machine.put("/proc/self/cgroup", "4:memory:/docker/abc/job\n");
  machine.put("/proc/self/mountinfo",
              "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  machine.put_v1("", "4000\n", 1000);
  machine.put_v1("/job", "3000\n", 1000);
  EXPECT_EQ(text_of(memory_limits(machine.root())),
            "cgroup v1 /docker/abc/job 3000 2000; cgroup v1 /docker/abc 4000 3000; ");
}

// The first mount's root is above the namespace's root, so the place of /job below it is unknown.
// The second mount shows /job, at a path with an escaped space.
TEST(MemoryLimits, AMountFromOutsideTheNamespaceIsParsed) {
  Machine machine;
  machine.put("/proc/self/cgroup", "0::/job\n");
  machine.put("/proc/self/mountinfo",
              "41 31 0:38 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
              "42 31 0:38 / /mnt/my\\040group rw - cgroup2 cgroup2 rw\n");
  machine.put_v2("", {"9000\n", "max\n", 1000});
  machine.put("/mnt/my group/job/memory.max", "5000\n");
  EXPECT_EQ(text_of(memory_limits(machine.root())), "cgroup v2 /job 5000 5000; ");
}

TEST(MemoryLimits, AForeignCgroupPathFallsBackToTheMountPoint) {
  for (const char* path : {"0::/../other\n", "0::/elsewhere\n", "0::/\n"}) {
    Machine machine;
    machine.put("/proc/self/cgroup", path);
    machine.put("/proc/self/mountinfo",
                "41 31 0:38 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine.put_v2("", {"9000\n", "max\n", 1000});
    EXPECT_EQ(text_of(memory_limits(machine.root())), "cgroup v2 /docker/abc 9000 8000; ") << path;
  }
}

TEST(MemoryLimits, MalformedTextsAreIgnored) {
  Machine machine;
  machine.put("/proc/self/cgroup", "\n:\n4\n0:\nmemory\n4:memory\n0::\n");
  machine.put("/proc/self/mountinfo", "\n-\n - \n1 2 3 / /x rw -\n1 - cgroup2 a b\n");
  machine.put("/proc/meminfo", "MemTotal: x kB\nMemAvailable:\n");
  EXPECT_EQ(text_of(memory_limits(machine.root())), "");
  EXPECT_EQ(oom_kill_count(machine.root()), 0U);
}

// Must fail if the caller's cgroup is read, or shared memory counts as page cache.
TEST(MemoryLimits, OfAnotherProcessAreThoseOfItsCgroup) {
  Machine machine;
  machine.put("/proc/self/cgroup", "0::/mine\n");
  machine.put("/proc/7/cgroup", "0::/job\n");
  machine.put("/proc/self/mountinfo", kV2Mount);
  machine.put_v2("/mine", {"9000\n", "max\n", 1000});
  machine.put_v2("/job", {"8000\n", "max\n", 5000});
  machine.put("/sys/fs/cgroup/job/memory.stat",
              "inactive_file 300\nactive_file 40\nshmem 1200\nshmem_thp 7\n");
  machine.put("/sys/fs/cgroup/job/memory.events", "oom_kill 3\n");
  const std::vector<MemoryLimit> limits = memory_limits(machine.root(), 7);
  EXPECT_EQ(text_of(limits), "cgroup v2 /job 8000 3340; ");
  EXPECT_EQ(limits.at(0).page_cache_bytes, 340U);
  EXPECT_EQ(limits.at(0).shmem_bytes, 1200U);
  EXPECT_EQ(oom_kill_count(machine.root(), 7), 3U);
  EXPECT_EQ(oom_kill_count(machine.root()), 0U);
}

TEST(MemoryLimits, V1CountsTheSharedMemoryOfChildCgroups) {
  Machine machine;
  machine.put("/proc/self/cgroup", "4:memory:/job\n");
  machine.put("/proc/self/mountinfo", kV1Mount);
  machine.put_v1("/job", "8000\n", 5000);
  machine.put("/sys/fs/cgroup/memory/job/memory.stat", "shmem 1\ntotal_shmem 1200\n");
  EXPECT_EQ(memory_limits(machine.root()).at(0).shmem_bytes, 1200U);
}

TEST(MemoryLimits, OfTheNodeHaveItsPageCache) {
  Machine machine;
  machine.put("/proc/meminfo",
              "MemTotal: 100 kB\nMemAvailable: 60 kB\nCached: 50 kB\nActive(file): 20 kB\n"
              "Inactive(file): 10 kB\nShmem: 5 kB\n");
  const std::vector<MemoryLimit> limits = memory_limits(machine.root());
  EXPECT_EQ(limits.at(0).page_cache_bytes, 30 * kKiB);
  EXPECT_EQ(limits.at(0).shmem_bytes, 5 * kKiB);
}

TEST(OomKillCount, SumsOverTheLevels) {
  Machine machine;
  machine.put("/proc/self/cgroup", "4:memory:/a/b\n0::/c\n");
  machine.put("/proc/self/mountinfo", std::string(kV2Mount) + std::string(kV1Mount));
  EXPECT_EQ(oom_kill_count(machine.root()), 0U);
  const std::string v1 = "/sys/fs/cgroup/memory";
  machine.put(v1 + "/a/b/memory.oom_control", "oom_kill_disable 1\nunder_oom 1\noom_kill 3\n");
  machine.put(v1 + "/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 10\n");
  machine.put("/sys/fs/cgroup/c/memory.events",
              "low 1\nhigh 2\nmax 4\noom 8\noom_kill 100\noom_group_kill 64\n");
  EXPECT_EQ(oom_kill_count(machine.root()), 113U);
  EXPECT_EQ(oom_kills_in_group(machine.root()), 3U) << "not those of other jobs in ancestors";
  EXPECT_EQ(oom_kills_in_group(Machine().root()), 0U);
}

// Must fail if a quota is ignored, read only at the innermost level, or rounded down to 0.
TEST(GrantedCpus, IsTheSmallestQuotaOfTheChainOrTheAffinity) {
  const int cpus = usable_cpus();
  Machine machine;
  EXPECT_EQ(granted_cpus(machine.root()), cpus);
  machine.put("/proc/self/cgroup", "4:cpu,cpuacct:/a/b\n0::/c/d\n");
  machine.put("/proc/self/mountinfo",
              std::string(kV2Mount) +
                  "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n");
  EXPECT_EQ(granted_cpus(machine.root()), cpus);
  machine.put("/sys/fs/cgroup/c/d/cpu.max", "max 100000\n");
  machine.put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
  machine.put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(granted_cpus(machine.root()), cpus);
  machine.put("/sys/fs/cgroup/c/cpu.max", "150000 100000\n");
  EXPECT_EQ(granted_cpus(machine.root()), std::min(cpus, 2));
  machine.put("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "20000\n");
  machine.put("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(granted_cpus(machine.root()), 1);
}

constexpr std::string_view kStatus =
    "Name:\tmodicum\nVmPeak:\t   9000 kB\nVmHWM:\t    500 kB\nVmRSS:\t    400 kB\n"
    "RssAnon:\t    300 kB\nRssFile:\t     90 kB\nRssShmem:\t     10 kB\nVmPTE:\t      8 kB\n";

TEST(ProcessMemory, IsReadFromStatusAndRollup) {
  Machine machine;
  machine.put("/proc/42/status", kStatus);
  machine.put("/proc/42/smaps_rollup",
              "00400000-7fff000 ---p 00000000 00:00 0   [rollup]\nRss:   400 kB\n"
              "Pss:   200 kB\nPss_Anon:   150 kB\nPss_File:   45 kB\nPss_Shmem:   5 kB\n");
  const ProcessMemory memory = read_process_memory(42, machine.root());
  EXPECT_EQ(memory.rss, 400 * kKiB);
  EXPECT_EQ(memory.rss_anon, 300 * kKiB);
  EXPECT_EQ(memory.rss_shmem, 10 * kKiB);
  EXPECT_EQ(memory.peak_rss, 500 * kKiB);
  EXPECT_EQ(memory.held_bytes(), (150 + 5 + 8) * kKiB);
  EXPECT_EQ(memory.peak_held(), (150 + 5 + 8 + 100) * kKiB);
}

TEST(ProcessMemory, WithoutPssSharedPagesCountInFull) {
  Machine machine;
  machine.put("/proc/self/status", kStatus);
  EXPECT_EQ(read_process_memory(0, machine.root()).held_bytes(), (300 + 10 + 8) * kKiB);
  machine.put("/proc/self/smaps_rollup", "Rss:   400 kB\nPss:   200 kB\n");
  EXPECT_EQ(read_process_memory(0, machine.root()).held_bytes(), (300 + 10 + 8) * kKiB);
}

TEST(ProcessMemory, AMissingOrEndedProcessIsAnIoError) {
  Machine machine;
  machine.put("/proc/43/status", "Name:\tmodicum\nState:\tZ (zombie)\n");
  for (const int pid : {42, 43}) {
    try {
      read_process_memory(pid, machine.root());
      ADD_FAILURE() << pid;
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::io);
      EXPECT_EQ(error.facts().culprit_pid, pid);
    }
  }
}

// Must fail if a dead process counts as living, or a process of another host, or one that /proc
// hides, as dead.
TEST(ProcessIdentity, DistinguishesProcessesWithTheSamePid) {
  Machine machine;
  machine.put("/proc/sys/kernel/hostname", "h-1/é\n");
  machine.put("/proc/sys/kernel/random/boot_id", "b\n");
  const auto put = [&](const std::string& pid, char state, int started) {
    machine.put("/proc/" + pid + "/stat",
                fmt::format("{} (a) b) {} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {} 0", pid, state,
                            started));
  };
  put("1", 'S', 5);
  put("42", 'S', 700);
  const ProcessIdentity process = identify_process(42, machine.root());
  EXPECT_EQ(process.host, "h_1___.b.5");
  EXPECT_EQ(process.started, 700U);
  EXPECT_FALSE(is_dead(process, machine.root()));
  put("42", 'Z', 700);
  EXPECT_TRUE(is_dead(process, machine.root()));
  put("42", 'S', 701);
  EXPECT_TRUE(is_dead(process, machine.root()));
  put("1", 'S', 6);  // another container
  EXPECT_FALSE(is_dead(process, machine.root()));
  put("1", 'S', 5);
  const auto none = [](int64_t) { return false; };
  EXPECT_TRUE(is_dead({process.host, 43, 700}, machine.root(), none)) << "there is no process 43";
  const auto is_hidden = [](int64_t pid) { return pid == 43; };
  EXPECT_FALSE(is_dead({process.host, 43, 700}, machine.root(), is_hidden));
  EXPECT_FALSE(is_dead({process.host, 42, 0}, machine.root())) << "its start was not known";
}

TEST(ProcessIdentity, AProcessOfAnotherUserExists) {
  EXPECT_TRUE(process_exists(1));  // for anybody but root: EPERM
  EXPECT_FALSE(process_exists(INT32_MAX));
}

TEST(KernelText, NumbersAreFoundByTheirWholeLabel) {
  EXPECT_EQ(kernel_number_after("inactive_file 5\nactive_file 6\n", "active_file"), 6U);
  EXPECT_EQ(kernel_number_after("oom_kill_disable 1\noom_kill 0", "oom_kill"), 0U);
  EXPECT_EQ(kernel_number_after("VmRSS:\t  12 kB\n", "VmRSS:"), 12U);
  EXPECT_EQ(kernel_number_after("VmRSS:\n", "VmRSS:"), std::nullopt);
  EXPECT_EQ(kernel_number_after("VmRSS: -1 kB\n", "VmRSS:"), std::nullopt);
  EXPECT_EQ(parse_kernel_number("max\n"), std::nullopt);
  EXPECT_EQ(parse_kernel_number("18446744073709551615\n"), UINT64_MAX);
  EXPECT_EQ(parse_kernel_number("18446744073709551616\n"), std::nullopt);
  EXPECT_EQ(parse_kernel_number(" \n"), std::nullopt);
}

// The remaining tests read this machine's /proc.

TEST(ThisMachine, HasLimitsTightestFirst) {
  const std::vector<MemoryLimit> limits = memory_limits();
  ASSERT_FALSE(limits.empty());
  for (size_t i = 1; i < limits.size(); ++i) {
    EXPECT_LE(limits[i - 1].available_bytes, limits[i].available_bytes);
  }
  for (const MemoryLimit& limit : limits) {
    EXPECT_LE(limit.available_bytes, limit.limit_bytes) << limit.source;
    EXPECT_GT(limit.limit_bytes, 0U) << limit.source;
  }
  EXPECT_NO_THROW(oom_kill_count());
}

TEST(ThisMachine, SeesMemoryAndItsPeak) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own";
  constexpr size_t kSize = 32 * kMiB;
  if (!reset_peak_rss()) GTEST_SKIP() << "this kernel cannot reset VmHWM";
  const ProcessMemory before = read_process_memory();
  void* const block = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  const ProcessMemory during = read_process_memory();
  munmap(block, kSize);
  const ProcessMemory after = read_process_memory();
  const auto margin = static_cast<double>(kMiB);
  EXPECT_NEAR(static_cast<double>(during.held_bytes() - before.held_bytes()), kSize, margin);
  EXPECT_NEAR(static_cast<double>(during.rss_anon - before.rss_anon), kSize, margin);
  EXPECT_LT(after.held_bytes(), before.held_bytes() + kMiB);
  EXPECT_NEAR(static_cast<double>(after.peak_held() - before.held_bytes()), kSize, margin);
}

TEST(ThisMachine, CountsSharedPagesProportionally) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own";
  constexpr size_t kSize = 32 * kMiB;
  void* const block = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  const ProcessMemory alone = read_process_memory();
  int ready[2];
  int done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    for (size_t at = 0; at < kSize; at += kPageBytes) static_cast<char*>(block)[at] = 1;
    char byte = 0;
    const bool was_heard = write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 1;
    _exit(was_heard ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const ProcessMemory together = read_process_memory();
  const ProcessMemory of_child = read_process_memory(child);
  ASSERT_EQ(write(done[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
  munmap(block, kSize);
  EXPECT_EQ(alone.rss_shmem, together.rss_shmem);
  if (alone.pss_shmem == together.pss_shmem) GTEST_SKIP() << "this kernel has no Pss_Shmem";
  EXPECT_NEAR(static_cast<double>(together.pss_shmem), kSize / 2.0, kMiB);
  EXPECT_NEAR(static_cast<double>(of_child.pss_shmem), kSize / 2.0, kMiB);
}

}  // namespace
}  // namespace modicum
