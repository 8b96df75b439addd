#include "modicum/watch/cage.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "modicum/probe/machine_double.h"

namespace modicum {
namespace {

// The cgroup files that the kernel's cgroup-v2.rst (Linux 6.1) describes, in a temporary directory.
// No kernel adds control files to a directory made there: a cgroup can be made, but its limit can't
// be set.
class MachineInV2 {
 public:
  MachineInV2(std::string_view max, std::string_view high) {
    machine_.put("/proc/self/cgroup", "0::/jobs/mine\n");
    machine_.put("/proc/self/mountinfo",
                 "41 31 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
    machine_.put_v2("/jobs", {"max\n", "max\n", 1000});
    machine_.put_v2("/jobs/mine", {max, high, 1000});
  }

  std::string refusal() {
    try {
      const MemoryCage cage(files_, 5000, machine_.root());
    } catch (const Error& error) {
      return error.what_happened();
    }
    return "";
  }
  size_t groups_in(const std::string& path) {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(machine_.root() + path)) {
      if (entry.is_directory()) ++count;
    }
    return count;
  }

 private:
  Machine machine_;
  PosixFileSystem files_;
};

TEST(MemoryCage, InV2AGroupWithALimitIsNotLeft) {
  for (const auto& [max, high] : {std::pair("9000\n", "max\n"), {"max\n", "9000\n"}}) {
    MachineInV2 machine(max, high);
    EXPECT_NE(machine.refusal().find("a limit of its own"), std::string::npos) << machine.refusal();
  }
}

TEST(MemoryCage, InV2ItIsMadeNextToACgroupThatHasProcesses) {
  MachineInV2 machine("max\n", "max\n");
  const std::string refusal = machine.refusal();
  EXPECT_NE(refusal.find("cannot limit a new memory cgroup"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("/jobs/modicum-watch-"), std::string::npos) << refusal;
  EXPECT_EQ(machine.groups_in("/sys/fs/cgroup/jobs"), 1U) << "the new group is removed";
  const std::string unique =
      fmt::format("-{}-{:x}-{:x}/", getpid(), pid_namespace(), identify_process(getpid()).started);
  EXPECT_NE(refusal.find(unique), std::string::npos) << "containers have equal pids: " << refusal;
}

}  // namespace
}  // namespace modicum
