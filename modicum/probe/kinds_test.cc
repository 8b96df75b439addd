// Tests of read_memory_kinds: which kind each mapping is, and the part of its pages that is read.
#include "modicum/probe/kinds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "modicum/base/base.h"
#include "modicum/base/sanitizers_double.h"
#include "modicum/probe/machine_double.h"

namespace modicum {
namespace {

// Catches: a large block counts as a heap or a stack; the rest of a mapping that the kernel has
// joined to a stack counts as stack; untouched pages count; pages of files that were never written
// count; the counts exceed what the process holds; a large heap is read whole.

// Entries of /proc/PID/pagemap.
constexpr uint64_t kWritten = uint64_t{1} << 63;
constexpr uint64_t kOfFile = kWritten | uint64_t{1} << 61;

// A process with a pagemap whose entries are set by ranges of addresses.
class FakeProcess {
 public:
  FakeProcess(std::string_view maps, uint64_t anon_kib, uint64_t shmem_kib = 0) {
    machine_.put("/proc/7/maps", maps);
    put_status(
        fmt::format("RssAnon:\t{} kB\nRssFile:\t90 kB\nRssShmem:\t{} kB\n", anon_kib, shmem_kib));
    machine_.put("/proc/7/pagemap", "");
    fill(0x7ff'0000'0000, kPageBytes, 0);  // its end: above all mappings of these tests
  }
  void put_status(const std::string& memory) {
    machine_.put("/proc/7/status",
                 "Name:\tpython\nState:\tS (sleeping)\nPPid:\t0\nVmHWM:\t 9 kB\n" + memory);
  }
  void fill(uint64_t begin, uint64_t bytes, uint64_t entry = kWritten) {
    std::fstream file(machine_.root() + "/proc/7/pagemap", std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(begin / kPageBytes * sizeof entry));
    for (uint64_t at = 0; at < bytes; at += kPageBytes) {
      file.write(reinterpret_cast<const char*>(&entry), sizeof entry);
    }
  }
  std::optional<MemoryKinds> read() const { return read_memory_kinds(7, machine_.root()); }
  // "malloc_heap 64, anonymous 8" in KiB, without kinds of 0 bytes.
  std::string text() const {
    const MemoryKinds kinds = read().value_or(MemoryKinds());
    std::string text;
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
      if (kinds.bytes[kind] == 0) continue;
      text +=
          fmt::format("{}{} {}", text.empty() ? "" : ", ",
                      memory_kind_name(static_cast<MemoryKind>(kind)), kinds.bytes[kind] / kKiB);
    }
    return text;
  }

 private:
  Machine machine_;
};

TEST(MemoryKinds, AreHeapsStacksWrittenFilesAndTheRest) {
  FakeProcess process(R"(00400000-00500000 r-xp 00000000 08:01 7    /usr/bin/python3
00500000-00510000 r--p 00000000 08:01 7    /usr/bin/python3
00510000-00520000 rw-p 00000000 08:01 7    /usr/bin/python3
00600000-00700000 r--p 00000000 08:01 8    /checkpoint/model.safetensors
01000000-01100000 rw-p 00000000 00:00 0    [heap]
10000000-10100000 rw-p 00000000 00:00 0
10100000-14000000 ---p 00000000 00:00 0
20001000-20002000 ---p 00000000 00:00 0
20002000-20802000 rw-p 00000000 00:00 0
30000000-31000000 rw-p 00000000 00:00 0
40000000-41000000 rw-s 00000000 00:01 9    /dev/shm/torch
50000000-50100000 rw-p 00000000 00:00 0    [stack]
)",
                      1000, 50);
  process.fill(0x0040'0000, 64 * kKiB, kOfFile);
  process.fill(0x0050'0000, 4 * kKiB);  // relocated, then protected
  process.fill(0x0051'0000, 8 * kKiB);
  process.fill(0x0052'0000, 8 * kKiB, kOfFile);
  process.fill(0x0060'0000, 64 * kKiB);
  process.fill(0x0100'0000, 100 * kKiB);
  process.fill(0x1000'0000, 200 * kKiB);
  process.fill(0x2080'0000, 8 * kKiB);
  process.fill(0x3000'0000, 400 * kKiB);
  process.fill(0x500f'0000, 32 * kKiB);
  EXPECT_EQ(process.text(),
            "malloc_heap 100, malloc_arenas 200, stacks 40, file_copies 12, anonymous 648, "
            "shared_memory 50");
  EXPECT_EQ(process.read()->file_bytes, 90 * kKiB);
  EXPECT_EQ(process.read()->total(), 1050 * kKiB);
}

// The first heap is partly used, the second is full, the third is full and merged with the used
// part of the fourth.
TEST(MemoryKinds, HeapsOfThreadsHave64MiBOfAddresses) {
  FakeProcess process(R"(08000000-08100000 rw-p 00000000 00:00 0
08100000-0c000000 ---p 00000000 00:00 0
10000000-14000000 rw-p 00000000 00:00 0    [anon: glibc: malloc arena]
18000000-1d000000 rw-p 00000000 00:00 0
1d000000-20000000 ---p 00000000 00:00 0
28000000-2d000000 rw-p 00000000 00:00 0
30000000-30100000 r--p 00000000 00:00 0
38100000-3c000000 rw-p 00000000 00:00 0
)",
                      100'000);
  process.fill(0x0800'0000, 512 * kKiB);
  process.fill(0x1000'0000, 1024 * kKiB);
  process.fill(0x1800'0000, 2048 * kKiB);
  for (const uint64_t block : {0x2800'0000, 0x3000'0000, 0x3810'0000}) {
    process.fill(block, 512 * kKiB);
  }
  EXPECT_EQ(process.text(), "malloc_arenas 3584, anonymous 96416");
}

// A guard and a stack of 8 MiB; the kernel has joined a block of 32 MiB to the stack. A guard that
// is larger belongs to another mapping.
TEST(MemoryKinds, WhatTheKernelJoinsToAStackIsNoStack) {
  FakeProcess process(R"(20000000-20001000 ---p 00000000 00:00 0
20001000-22801000 rw-p 00000000 00:00 0
30000000-30100000 ---p 00000000 00:00 0
30100000-30200000 rw-p 00000000 00:00 0
)",
                      50'000);
  process.fill(0x2080'0000, 0x200'0000);
  process.fill(0x3010'0000, 1024 * kKiB);
  EXPECT_EQ(process.text(), "stacks 4, anonymous 49996");
}

// 1 GiB of which the first half is touched: every fourth block is read.
TEST(MemoryKinds, OfALargeHeapSomeBlocksAreRead) {
  FakeProcess process("40000000-80000000 rw-p 00000000 00:00 0    [heap]\n", 700 * 1024);
  process.fill(0x4000'0000, 512 * kMiB);
  EXPECT_EQ(process.text(), "malloc_heap 524288, anonymous 192512");
  process.put_status("RssAnon:\t300000 kB\n");
  EXPECT_EQ(process.text(), "malloc_heap 300000") << "not more than the process holds";
}

TEST(MemoryKinds, OfAProcessThatCannotBeReadAreNone) {
  Machine machine;
  EXPECT_EQ(read_memory_kinds(7, machine.root()), std::nullopt);
  machine.put("/proc/7/status", "Name:\tx\nState:\tS\nPPid:\t0\nRssAnon:\t9 kB\n");
  machine.put("/proc/7/maps", "");
  EXPECT_EQ(read_memory_kinds(7, machine.root()), std::nullopt) << "it has ended";
  machine.put("/proc/7/maps", "01000000-01100000 rw-p 00000000 00:00 0    [heap]\n");
  EXPECT_EQ(read_memory_kinds(7, machine.root()), std::nullopt) << "no pagemap";
}

// This process itself: a block, of which a quarter is written.
TEST(MemoryKinds, OfThisProcessGrowByWhatItWrites) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own";
  const auto before = read_memory_kinds(static_cast<int>(getpid()));
  ASSERT_TRUE(before);
  constexpr size_t kSize = 64 * kMiB;
  void* const block =
      mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  madvise(block, kSize, MADV_NOHUGEPAGE);
  auto* const bytes = static_cast<volatile char*>(block);
  for (size_t at = 0; at < kSize / 4; at += kPageBytes) bytes[at] = 1;
  const auto after = read_memory_kinds(static_cast<int>(getpid()));
  munmap(block, kSize);
  const auto grown = (*after)[MemoryKind::anonymous] - (*before)[MemoryKind::anonymous];
  EXPECT_NEAR(static_cast<double>(grown), static_cast<double>(kSize / 4), 2.0 * kMiB);
}

}  // namespace
}  // namespace modicum
