// Tests of read_settings on the files of imaginary machines.
#include "modicum/probe/settings.h"

#include <gtest/gtest.h>

#include "modicum/io/io.h"
#include "modicum/probe/machine_double.h"

namespace modicum {
namespace {

constexpr std::string_view kLimits =
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max locked memory         65536                unlimited            bytes     \n"
    "Max open files            1024                 524288               files     \n"
    "Max address space         unlimited            unlimited            bytes     \n"
    "Max nice priority         0                    0                    \n";

// Must fail if soft and hard limits are exchanged, or "unlimited" is read as an unknown limit.
TEST(Settings, OfAProcessAreItsOwnLimits) {
  Machine machine;
  machine.put("/proc/self/limits", "Max locked memory  1 1 bytes\n");
  machine.put("/proc/7/limits", kLimits);
  const Settings settings = read_settings(7, machine.root());
  ASSERT_TRUE(settings.locked_memory && settings.open_files && settings.address_space);
  EXPECT_EQ(settings.locked_memory->soft, 65536U);
  EXPECT_TRUE(settings.locked_memory->hard == UINT64_MAX);
  EXPECT_FALSE(settings.locked_memory->is_unlimited());
  EXPECT_EQ(settings.open_files->soft, 1024U);
  EXPECT_EQ(settings.open_files->hard, 524288U);
  EXPECT_TRUE(settings.address_space->is_unlimited());
  EXPECT_EQ(read_settings(0, machine.root()).locked_memory->soft, 1U);
}

TEST(Settings, OfTheKernelAreReadFromItsFiles) {
  Machine machine;
  machine.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  machine.put("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
              "always within_size advise [never] deny force\n");
  machine.put("/proc/sys/vm/overcommit_memory", "2\n");
  machine.put("/proc/sys/vm/max_map_count", "65530\n");
  machine.put("/proc/meminfo",
              "SwapCached: 9 kB\nSwapTotal:  2048 kB\nSwapFree:  1024 kB\nCommitLimit:  100 kB\n"
              "Committed_AS:   40 kB\n");
  const Settings settings = read_settings(0, machine.root());
  EXPECT_EQ(settings.huge_pages, "madvise");
  EXPECT_EQ(settings.shmem_huge_pages, "never");
  EXPECT_EQ(settings.overcommit, 2U);
  EXPECT_EQ(settings.max_map_count, 65530U);
  EXPECT_EQ(settings.swap_bytes, 2048 * kKiB);
  EXPECT_EQ(settings.swap_free_bytes, 1024 * kKiB);
  EXPECT_EQ(settings.commit_limit_bytes, 100 * kKiB);
  EXPECT_EQ(settings.committed_bytes, 40 * kKiB);
}

TEST(Settings, ThatCannotBeReadAreAbsent) {
  Machine machine;
  machine.put("/proc/self/limits", "Max locked memory\nMax open files  many few files\n");
  machine.put("/sys/kernel/mm/transparent_hugepage/enabled", "]always[\n");
  machine.put("/proc/sys/vm/max_map_count", "max\n");
  machine.put("/proc/meminfo", "SwapTotal:\n");
  const Settings settings = read_settings(0, machine.root());
  EXPECT_FALSE(settings.locked_memory || settings.open_files || settings.address_space);
  EXPECT_FALSE(settings.may_lock_all);
  EXPECT_EQ(settings.huge_pages + settings.shmem_huge_pages, "");
  EXPECT_FALSE(settings.swap_bytes || settings.overcommit || settings.shm_bytes ||
               settings.max_map_count);
}

// Must fail if root in a rootless container counts as the machine's root.
TEST(Settings, LockingAllNeedsTheCapabilityOfTheInitialNamespace) {
  constexpr std::string_view kRoot = "CapEff:\t000001ffffffffff\n";
  constexpr std::string_view kWithoutIpcLock =
      "CapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffbfff\n";
  constexpr std::string_view kInitial = "         0          0 4294967295\n";
  const auto may_lock_all = [](std::string_view status, std::string_view uid_map) {
    Machine machine;
    machine.put("/proc/self/status", status);
    machine.put("/proc/self/uid_map", uid_map);
    return read_settings(0, machine.root()).may_lock_all;
  };
  EXPECT_TRUE(may_lock_all(kRoot, kInitial));
  EXPECT_TRUE(may_lock_all(kRoot, ""));  // a kernel without user namespaces
  EXPECT_FALSE(may_lock_all(kWithoutIpcLock, kInitial));
  EXPECT_FALSE(may_lock_all(kRoot, "         0       1000          1\n"));
}

TEST(Settings, SharedMemoryIsThatOfTheProcess) {
  Machine machine;
  machine.put("/dev/shm/of the machine", "");
  const auto space = space_of(machine.root() + "/dev/shm");
  ASSERT_TRUE(space);
  EXPECT_EQ(read_settings(7, machine.root()).shm_bytes, space->size_bytes);
  std::filesystem::create_directories(machine.root() + "/proc/7/root/dev");
  std::filesystem::create_symlink("/proc", machine.root() + "/proc/7/root/dev/shm");
  EXPECT_EQ(read_settings(7, machine.root()).shm_bytes, 0U);  // as /proc has no size
}

}  // namespace
}  // namespace modicum
