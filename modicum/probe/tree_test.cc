#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <map>
#include <utility>

#include "modicum/base/sanitizers_double.h"
#include "modicum/probe/machine_double.h"
#include "modicum/probe/probe.h"

namespace modicum {
namespace {

constexpr uint64_t kPresent = uint64_t{1} << 63;
constexpr uint64_t kOfFile = uint64_t{1} << 61;
constexpr uint64_t kAlone = kPresent | uint64_t{1} << 56;  // no other process maps the page
constexpr std::string_view kAuxv = "the same until a program is started";

// A process of 64 pages, whose private memory is pages 16 to 31 in the default `smaps`.
constexpr std::string_view kSmaps =
    "00010000-00020000 rw-p 00000000 00:00 0    [heap]\nSize:   64 kB\nRss:   64 kB\n"
    "AnonHugePages:   0 kB\nVmFlags: rd wr mr mw me ac \n"
    "00020000-00030000 rw-s 00000000 00:01 7    /dev/shm/x\nRss:   64 kB\nVmFlags: rd wr sh \n";
constexpr std::string_view kMaps = "00010000-00020000 rw-p 00000000 00:00 0   [heap]\n";

struct FakeProcess {
  int pid = 0;
  int parent = 0;
  std::map<uint64_t, uint64_t> entries;  // of /proc/PID/pagemap, by page number
  std::string_view maps = kMaps;
  std::string_view smaps = kSmaps;
  std::string_view auxv = kAuxv;
};

void put(Machine& machine, const FakeProcess& process) {
  const std::string directory = "/proc/" + std::to_string(process.pid);
  machine.put(directory + "/stat", std::to_string(process.pid) + " (a ) 7 (b) S " +
                                       std::to_string(process.parent) + " 1 1 0\n");
  machine.put(directory + "/status", "VmRSS:\t    8 kB\nRssAnon:\t    8 kB\nVmPTE:\t    4 kB\n");
  machine.put(directory + "/auxv", process.auxv);
  machine.put(directory + "/maps", process.maps);
  machine.put(directory + "/smaps", process.smaps);
  std::array<uint64_t, 64> table{};
  for (const auto& [page, entry] : process.entries) table.at(page) = entry;
  machine.put(directory + "/pagemap", {reinterpret_cast<const char*>(table.data()), sizeof(table)});
}

// "own+copied" of each range and of the rest, in pages.
std::string text_of(const TreeMemory& tree) {
  std::string text;
  const auto add = [&](const RangeMemory& memory) {
    text += std::to_string(static_cast<double>(memory.own_bytes) / kPageBytes).substr(0, 4) + "+" +
            std::to_string(static_cast<double>(memory.copied_bytes) / kPageBytes).substr(0, 4) +
            " ";
  };
  for (const RangeMemory& range : tree.ranges) add(range);
  add(tree.rest);
  return text;
}

constexpr AddressRange page(uint64_t at, uint64_t n = 1) {
  return {at * kPageBytes, (at + n) * kPageBytes};
}

// Must fail if a process name ends at its first bracket, or grandchildren are omitted.
TEST(Descendants, AreFoundThroughTheirParents) {
  Machine machine;
  put(machine, {.pid = 100, .parent = 1});
  put(machine, {.pid = 300, .parent = 100});
  put(machine, {.pid = 200, .parent = 300});
  put(machine, {.pid = 400, .parent = 1});
  machine.put("/proc/500/other", "");
  EXPECT_EQ(descendants(100, machine.root()), (std::vector<int>{200, 300}));
  EXPECT_EQ(descendants(200, machine.root()), (std::vector<int>{}));
}

TEST(Descendants, AreRecognisedByTheirParents) {
  Machine machine;
  for (const auto& [pid, parent] : {std::pair(100, 1), {300, 100}, {200, 300}, {400, 1}}) {
    machine.put(fmt::format("/proc/{}/status", pid),
                fmt::format("Name:\ta\nState:\tS (sleeping)\nPPid:\t{}\n", parent));
  }
  for (const auto& [pid, is_it] :
       {std::pair(100, false), {200, true}, {300, true}, {400, false}, {500, false}}) {
    EXPECT_EQ(is_descendant(pid, 100, machine.root()), is_it) << pid;
  }
}

TEST(Tree, PagesOfOneProcessAreCountedAsItsOwn) {
  Machine machine;
  put(machine,
      {.pid = 100, .entries = {{16, kAlone}, {17, kAlone | 5}, {18, kPresent | kOfFile}, {20, 0}}});
  const std::array<AddressRange, 2> ranges = {page(16), page(18, 4)};
  const TreeMemory tree = read_tree(100, ranges, machine.root());
  EXPECT_EQ(text_of(tree), "1.00+0.00 0.00+0.00 1.00+0.00 ");
  ASSERT_EQ(tree.processes.size(), 1U);
  EXPECT_EQ(tree.processes[0].memory.held_bytes(), 12 * kKiB);
}

// Two children share page 16, which the parent has written to since the forks. Must fail if their
// page counts twice or not at all, or if page 17, which all share, counts as a copy.
TEST(Tree, PagesKeptByChildrenCountOnceAsCopies) {
  for (const uint64_t frame : {0, 7}) {  // 0: frame numbers can't be read
    Machine machine;
    put(machine,
        {.pid = 100, .entries = {{16, kAlone | 1}, {17, kPresent | frame}, {18, kAlone | 2}}});
    put(machine, {.pid = 101,
                  .parent = 100,
                  .entries = {{16, kPresent | frame}, {17, kPresent | frame}, {18, kAlone | 3}}});
    put(machine, {.pid = 102,
                  .parent = 100,
                  .entries = {{16, kPresent | frame}, {17, kPresent | frame}, {18, kAlone | 4}}});
    const std::array<AddressRange, 3> ranges = {page(16), page(17), page(18)};
    EXPECT_EQ(text_of(read_tree(100, ranges, machine.root())),
              "1.00+1.00 1.00+0.00 1.00+2.00 0.00+0.00 ");
  }
}

TEST(Tree, FramesDistinguishForksOfDifferentTimes) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kPresent | 1}}});
  for (const int pid : {101, 102, 103, 104, 105}) {
    const uint64_t frame = pid < 103 ? 1 : pid < 105 ? 2 : 3;
    put(machine, {.pid = pid, .parent = 100, .entries = {{16, kPresent | frame}}});
  }
  // The frame that only the last process maps is shared with a foreign process.
  EXPECT_EQ(text_of(read_tree(100, {}, machine.root())), "1.00+1.00 ");
}

// Must fail if a page counts that only one process of the tree maps, but not exclusively (page 16
// is the zero page).
TEST(Tree, PagesSharedWithForeignProcessesAreNotCounted) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kPresent}, {17, kPresent | 9}}});
  put(machine, {.pid = 101, .parent = 100, .entries = {{17, kPresent | 8}}});
  EXPECT_EQ(text_of(read_tree(100, {}, machine.root())), "0.00+0.00 ");
}

TEST(Tree, AProcessAfterExecHoldsNoCopies) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}}});
  put(machine, {.pid = 101, .parent = 100, .entries = {{16, kAlone}}, .auxv = "another"});
  const TreeMemory tree = read_tree(100, {}, machine.root());
  EXPECT_EQ(text_of(tree), "1.00+0.00 ");
  ASSERT_EQ(tree.processes.size(), 2U);
  EXPECT_FALSE(tree.processes[1].is_forked);
}

TEST(Tree, RangesSplitAPageByBytes) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}, {17, kAlone}}});
  put(machine, {.pid = 101, .parent = 100, .entries = {{16, kAlone}}});
  const uint64_t at = 16 * kPageBytes;
  const std::array<AddressRange, 3> ranges = {AddressRange{at, at + 1024},
                                              AddressRange{at + 1024, at + 3072},
                                              AddressRange{at + 3072, at + 6144}};
  EXPECT_EQ(text_of(read_tree(100, ranges, machine.root())),
            "0.25+0.25 0.50+0.50 0.75+0.25 0.50+0.00 ");
}

// Must fail if a child's own mapping at the address of an excluded buffer counts as a copy, or if
// copies in a child that was forked before the exclusion are omitted.
TEST(Tree, AnExcludedAreaHasCopiesOnlyInEarlierForks) {
  constexpr std::string_view kLeftOut =
      "00010000-00020000 rw-p 00000000 00:00 0\nRss:   64 kB\nVmFlags: rd wr mr dc ac \n";
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}, {17, kAlone}}, .smaps = kLeftOut});
  put(machine, {.pid = 101,
                .parent = 100,
                .entries = {{16, kAlone}},
                .maps = "0000f000-00018000 rw-p 0 00:00 0\n00018000-00020000 r--p 0 00:00 0\n"});
  put(machine, {.pid = 102,
                .parent = 100,
                .entries = {{16, kAlone}, {17, kAlone}},
                .maps = "0000f000-00012000 rw-p 0 00:00 0\n"});
  EXPECT_EQ(text_of(read_tree(100, {}, machine.root())), "2.00+1.00 ");
}

TEST(Tree, AChildThatEndsMeanwhileIsSkipped) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}}});
  machine.put("/proc/101/stat", "101 (gone) Z 100 1\n");
  EXPECT_EQ(read_tree(100, {}, machine.root()).processes.size(), 1U);
}

TEST(Tree, OverlappingRangesAndMissingProcessesAreErrors) {
  Machine machine;
  put(machine, {.pid = 100});
  const std::array<AddressRange, 2> ranges = {page(16, 2), page(17)};
  const auto category_of = [&](int pid, std::span<const AddressRange> asked) {
    try {
      read_tree(pid, asked, machine.root());
    } catch (const Error& error) {
      return error.category();
    }
    return Category::internal;
  };
  EXPECT_EQ(category_of(100, ranges), Category::usage);
  EXPECT_EQ(category_of(99, {}), Category::io);
}

// "PID<PARENT:pages " of each forked process.
std::string text_of(const std::vector<ForkCopies>& copies) {
  std::string text;
  for (const ForkCopies& copy : copies) {
    text += std::to_string(copy.pid) + "<" + std::to_string(copy.forked_from) + ":" +
            std::to_string(static_cast<double>(copy.bytes) / kPageBytes).substr(0, 4) + " ";
  }
  return text;
}

// Must fail if a copy that two children share counts in full for each, a page that all share counts
// as a copy, or a new page of a child is omitted.
TEST(ForkCopies, AreDividedAmongTheChildrenThatShareThem) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone | 1}, {17, kPresent | 7}, {18, kPresent | 8}}});
  put(machine, {.pid = 101,
                .parent = 100,
                .entries = {{16, kPresent | 6}, {17, kPresent | 7}, {18, kAlone | 3}}});
  put(machine, {.pid = 102,
                .parent = 100,
                .entries = {{16, kPresent | 6}, {17, kPresent | 7}, {18, kPresent | 8}}});
  put(machine, {.pid = 103, .parent = 100, .entries = {{16, kAlone}}, .auxv = "another"});
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root())), "101<100:1.50 102<100:0.50 ");
}

TEST(ForkCopies, OfARefusedFamilyAreLeftOut) {
  Machine machine;
  put(machine, {.pid = 100, .auxv = "launcher"});
  for (const int rank : {200, 300}) {
    const std::string_view auxv = rank == 200 ? "first" : "second";
    put(machine, {.pid = rank, .parent = 100, .entries = {{16, kAlone}}, .auxv = auxv});
    put(machine, {.pid = rank + 1, .parent = rank, .entries = {{16, kAlone}}, .auxv = auxv});
  }
  std::vector<int> asked;
  const auto may_read = [&](int family) {
    asked.push_back(family);
    return family == 300;
  };
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root(), may_read)), "301<300:1.00 ");
  EXPECT_EQ(asked, (std::vector<int>{200, 300}));
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root())), "201<200:1.00 301<300:1.00 ");
}

// A child that ends meanwhile has no pagemap.
TEST(ForkCopies, OfTheOtherChildrenAreReadIfOneHasEnded) {
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}}});
  for (const int pid : {101, 102, 103}) {
    put(machine, {.pid = pid, .parent = 100, .entries = {{16, kAlone}}});
  }
  std::filesystem::remove(machine.root() + "/proc/101/pagemap");
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root())),
            "101<100:0.00 102<100:1.00 103<100:1.00 ");
}

// The smaps of this many mappings exceed 16 MiB.
TEST(ForkCopies, OfAProcessWithManyMappings) {
  std::string smaps(kSmaps);
  for (int i = 0; i < 40'000; ++i) {
    smaps += fmt::format("{:x}-{:x} rw-s 00000000 00:01 7    /dev/zero (deleted)\n",
                         i * 0x2000 + 0x40000, i * 0x2000 + 0x41000);
    smaps += "Rss:   4 kB\n" + std::string(400, ' ') + "\nVmFlags: rd wr sh \n";
  }
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}}, .smaps = smaps});
  put(machine, {.pid = 101, .parent = 100, .entries = {{16, kAlone}}});
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root())), "101<100:1.00 ");
  EXPECT_EQ(text_of(read_tree(100, {}, machine.root())), "1.00+1.00 ");
}

// Must fail if copies in a grandchild count twice: with the root's areas and with its parent's.
TEST(ForkCopies, OfGrandchildrenCountOnce) {
  constexpr std::string_view kMore =
      "00010000-00012000 rw-p 00000000 00:00 0\nRss:   8 kB\nVmFlags: rd wr \n"
      "00012000-00030000 rw-p 00000000 00:00 0\nRss:   8 kB\nVmFlags: rd wr \n";
  constexpr std::string_view kFirst =
      "00010000-00012000 rw-p 00000000 00:00 0\nRss:   8 kB\nVmFlags: rd wr \n";
  Machine machine;
  put(machine, {.pid = 100, .entries = {{16, kAlone}, {17, kAlone}}, .smaps = kFirst});
  put(machine, {.pid = 300,
                .parent = 100,
                .entries = {{16, kAlone}, {17, kAlone}, {32, kAlone}, {33, kAlone}},
                .smaps = kMore});
  put(machine, {.pid = 200, .parent = 300, .entries = {{16, kAlone}, {32, kAlone}}});
  EXPECT_EQ(text_of(read_fork_copies(100, machine.root())), "300<100:2.00 200<300:2.00 ");
}

// The remaining tests read this machine's /proc.

class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ != 0) return;
    pause();
    _exit(0);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;

 private:
  pid_t pid_;
};

constexpr size_t kSize = 8 * kMiB;

void write_to(std::byte* data, size_t size) {
  for (size_t at = 0; at < size; at += kPageBytes) data[at] = std::byte{1};
}

// The memory of a block of kSize bytes, half of which is written again while two children live.
// left_out: the block is excluded from forks.
RangeMemory held_by_block(bool left_out) {
  void* const block =
      mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const data = static_cast<std::byte*>(block);
  write_to(data, kSize);
  if (left_out) madvise(block, kSize, MADV_DONTFORK);
  RangeMemory memory;
  {
    const Child child;
    const Child other;
    write_to(data, kSize / 2);
    const auto begin = reinterpret_cast<uint64_t>(data);
    const std::array<AddressRange, 1> ranges = {AddressRange{begin, begin + kSize}};
    memory = read_tree(0, ranges).ranges[0];
  }
  munmap(block, kSize);
  return memory;
}

TEST(ThisMachine, ShowsTheMemoryThatAForkCosts) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers reserve terabytes, all of which would be read";
  const RangeMemory inherited = held_by_block(false);
  EXPECT_EQ(inherited.own_bytes, kSize);
  EXPECT_EQ(inherited.copied_bytes, kSize / 2);
  EXPECT_EQ(inherited.shared_bytes, kSize / 2);
  const RangeMemory left_out = held_by_block(true);
  EXPECT_EQ(left_out.own_bytes, kSize);
  EXPECT_EQ(left_out.copied_bytes, 0U);
  EXPECT_EQ(left_out.shared_bytes, 0U);
}

TEST(ThisMachine, TheSumOverTheTreeIsTheMemoryHeld) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own";
  const Child child;
  const TreeMemory tree = read_tree(0, {});
  uint64_t anon = 0;
  for (const TreeMemory::Process& process : tree.processes) anon += process.memory.pss_anon;
  ASSERT_EQ(tree.processes.size(), 2U);
  EXPECT_TRUE(tree.processes[1].is_forked);
  EXPECT_NEAR(static_cast<double>(tree.rest.own_bytes + tree.rest.copied_bytes),
              static_cast<double>(anon), 256.0 * kKiB);
}

}  // namespace
}  // namespace modicum
