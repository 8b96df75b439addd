// Tests of read_program: children and how they were started, shared pages, heaps of malloc.
#include "modicum/probe/program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "modicum/probe/machine_double.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

using namespace std::string_view_literals;

// Entries of /proc/PID/pagemap: a page that several processes map, and one that one process maps.
constexpr uint64_t kShared = uint64_t{1} << 63;
constexpr uint64_t kAlone = kShared | uint64_t{1} << 56;

constexpr std::string_view kMaps = "00010000-00020000 rw-p 00000000 00:00 0    [heap]\n";
constexpr std::string_view kSmaps =
    "00010000-00020000 rw-p 00000000 00:00 0    [heap]\nRss:   64 kB\nVmFlags: rd wr mr me ac \n";
constexpr std::string_view kPython = "python\0train.py\0"sv;
constexpr std::string_view kForkServer =
    "python\0-c\0from multiprocessing.forkserver import main; main(5, 6)\0"sv;
constexpr std::string_view kSpawned =
    "python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)\0"sv;

struct FakeProcess {
  int pid = 0;
  int parent = 1;
  std::string_view auxv = "of the trainer";
  std::string_view command = kPython;
  std::map<uint64_t, uint64_t> entries;  // of /proc/PID/pagemap, by page number
  std::string_view maps = kMaps;
  std::string_view environment;
  std::string_view status;
};

void put(Machine& machine, const FakeProcess& process) {
  const std::string directory = "/proc/" + std::to_string(process.pid);
  machine.put(directory + "/stat", std::to_string(process.pid) + " (python) S " +
                                       std::to_string(process.parent) + " 1 1 0\n");
  machine.put(directory + "/status", "VmRSS:\t 8 kB\nRssAnon:\t 8 kB\nVmPTE:\t 4 kB\nVmHWM:\t" +
                                         std::to_string(process.pid) + " kB\nPPid:\t" +
                                         std::to_string(process.parent) + "\n" +
                                         std::string(process.status));
  machine.put(directory + "/comm", "python\n");
  machine.put(directory + "/cmdline", process.command);
  machine.put(directory + "/environ", process.environment);
  machine.put(directory + "/auxv", process.auxv);
  machine.put(directory + "/maps", process.maps);
  machine.put(directory + "/smaps", kSmaps);
  std::array<uint64_t, 64> table{};
  for (const auto& [page, entry] : process.entries) table.at(page) = entry;
  machine.put(directory + "/pagemap", {reinterpret_cast<const char*>(table.data()), sizeof(table)});
}

// "pid method shared pages; ..."
std::string text_of(const Program& program) {
  std::string text;
  for (const ChildProcess& child : program.children) {
    text += std::to_string(child.pid) + " " + std::string(start_method_name(child.method)) + " " +
            std::to_string(child.shared_bytes / kPageBytes) + "; ";
  }
  return text;
}

// Must fail if a child of the fork server counts as a fork of the trainer, or if a grandchild is
// compared with the trainer instead of its parent.
TEST(Program, StartMethodsAreThoseOfMultiprocessing) {
  Machine machine;
  put(machine, {.pid = 100});
  put(machine, {.pid = 101, .parent = 100});
  put(machine, {.pid = 102, .parent = 100, .auxv = "server", .command = kForkServer});
  put(machine, {.pid = 103, .parent = 102, .auxv = "server", .command = kForkServer});
  put(machine, {.pid = 104, .parent = 100, .auxv = "spawned", .command = kSpawned});
  put(machine, {.pid = 105, .parent = 104, .auxv = "spawned", .command = kSpawned});
  put(machine, {.pid = 106, .parent = 100, .auxv = "other", .command = "nvidia-smi"});
  put(machine, {.pid = 107, .parent = 100, .auxv = ""});  // a zombie
  EXPECT_EQ(text_of(read_program(100, machine.root())),
            "101 fork 0; 102 helper 0; 103 forkserver 0; 104 spawn 0; 105 fork 0; 106 exec 0; ");
}

// Must fail if a copied page counts as exposed, or a page that two children share counts twice.
TEST(Program, ExposedPagesAreTheParentsThatForkedChildrenMap) {
  for (const uint64_t seen : {0, 1}) {  // 0: frame numbers can't be read
    const auto shared = [&](uint64_t frame) { return kShared | frame * seen; };
    const auto alone = [&](uint64_t frame) { return kAlone | frame * seen; };
    Machine machine;
    put(machine, {.pid = 100, .entries = {{16, shared(7)}, {17, alone(8)}, {18, shared(9)}}});
    put(machine,
        {.pid = 101, .parent = 100, .entries = {{16, shared(7)}, {17, alone(3)}, {18, shared(9)}}});
    put(machine, {.pid = 102, .parent = 100, .entries = {{16, shared(7)}, {18, alone(4)}}});
    const Program program = read_program(100, machine.root());
    EXPECT_EQ(text_of(program), "101 fork 2; 102 fork 1; ");
    EXPECT_EQ(program.exposed_bytes, 2 * kPageBytes);
    EXPECT_EQ(program.copied_bytes, 2 * kPageBytes);
  }
}

// Must fail if the data-loader workers of a launcher's ranks are not found.
TEST(Program, ForksOfALaunchersRanksCount) {
  Machine machine;
  put(machine, {.pid = 10, .auxv = "of the launcher"});
  for (const int rank : {100, 200}) {
    const std::string auxv = "of rank " + std::to_string(rank);
    const auto frame = static_cast<uint64_t>(rank);
    put(machine, {.pid = rank, .parent = 10, .auxv = auxv, .entries = {{16, kShared | frame}}});
    put(machine,
        {.pid = rank + 1, .parent = rank, .auxv = auxv, .entries = {{16, kShared | frame}}});
  }
  const Program program = read_program(10, machine.root());
  EXPECT_EQ(text_of(program), "100 exec 0; 101 fork 1; 200 exec 0; 201 fork 1; ");
  EXPECT_EQ(program.exposed_bytes, 2 * kPageBytes);
}

// The maps of this many mappings exceed the longest text that is read as a whole.
TEST(Program, MayHaveManyMappings) {
  Machine machine;
  std::string maps;
  for (int i = 0; i < 40'000; ++i) {
    maps += fmt::format("{:x}-{:x} rw-s 00000000 00:01 7 {:>400}\n", i * 0x2000 + 0x10000,
                        i * 0x2000 + 0x11000, "/dev/zero (deleted)");
  }
  maps += "f00000000-f00010000 rw-p 00000000 00:00 0    [heap]\n";
  put(machine, {.pid = 100, .maps = maps});
  EXPECT_EQ(read_program(100, machine.root()).mappings, 40'001U);
}

TEST(Program, MappedLibrariesNameTheAllocatorAndCuda) {
  Machine machine;
  put(machine, {.pid = 100,
                .maps = "1000-2000 r-xp 0 08:01 7 /usr/lib/libjemalloc.so.2\n"
                        "3000-4000 r-xp 0 08:01 8 /usr/lib/libcuda.so.1\n"});
  const Program program = read_program(100, machine.root());
  EXPECT_EQ(program.allocator, "jemalloc");
  EXPECT_TRUE(program.uses_cuda);
}

// Must fail if a variable whose name only begins or ends with the wanted name counts.
TEST(Program, TheEnvironmentHasTheAllocatorsOptions) {
  const auto program_with = [](std::string_view environment) {
    Machine machine;
    put(machine, {.pid = 100, .environment = environment});
    return read_program(100, machine.root());
  };
  EXPECT_EQ(program_with("A=1\0MALLOC_ARENA_MAX=2\0B=3"sv).arena_max, 2U);
  EXPECT_EQ(program_with("MALLOC_ARENA_MAXIMUM=2\0MY_MALLOC_ARENA_MAX=3"sv).arena_max,
            std::nullopt);
  EXPECT_EQ(
      program_with("GLIBC_TUNABLES=glibc.malloc.check=1:glibc.malloc.arena_max=4"sv).arena_max, 4U);
  EXPECT_EQ(
      program_with("PYTORCH_CUDA_ALLOC_CONF=old\0PYTORCH_ALLOC_CONF=new"sv).torch_allocator_options,
      "new");
  EXPECT_EQ(program_with("PYTORCH_ALLOC_CONFIG=new\0PYTORCH_CUDA_ALLOC_CONF=old"sv)
                .torch_allocator_options,
            "old");
}

TEST(Program, StatusAndDescriptorsAreRead) {
  Machine machine;
  put(machine, {.pid = 100, .status = "VmLck:\t 4 kB\nVmPin:\t 8 kB\nVmSwap:\t 16 kB\n"});
  for (const char* const fd : {"0", "1", "7"}) machine.put(std::string("/proc/100/fd/") + fd, "");
  const Program program = read_program(100, machine.root());
  EXPECT_EQ(program.name, "python");
  EXPECT_EQ(program.locked_bytes, 12 * kKiB);
  EXPECT_EQ(program.swapped_bytes, 16 * kKiB);
  EXPECT_EQ(program.open_files, 3U);
}

TEST(Program, ThatCannotBeReadIsAnErrorWithItsPid) {
  Machine machine;
  machine.put("/proc/5/status", "PPid:\t1\n");
  machine.put("/proc/6/status", "PPid:\t1\n");
  machine.put("/proc/6/maps", "");
  for (const int pid : {4, 5, 6}) {
    try {
      read_program(pid, machine.root());
      FAIL() << pid;
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::io);
      EXPECT_EQ(error.facts().culprit_pid, pid);
    }
  }
}

}  // namespace
}  // namespace modicum
