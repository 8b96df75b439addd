#include "modicum/memory/memory.h"
#include "modicum/base/error_double.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "modicum/base/sanitizers_double.h"

namespace modicum {
namespace {

#define SKIP_UNDER_SANITIZERS() \
  if (kIsSanitized) GTEST_SKIP() << "sanitizers hold memory of their own for every byte of ours"

// A value of /proc/self/status, converted from KiB to bytes.
uint64_t status_bytes(const std::string& label) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with(label + ":")) return std::stoull(line.substr(label.size() + 1)) * kKiB;
  }
  ADD_FAILURE() << "/proc/self/status has no " << label;
  return 0;
}

bool is_all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// Runs `check` in a forked child and returns its result.
bool holds_in_a_child(FunctionRef<bool()> check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Ledger, ChargesWholePagesExactly) {
  Ledger ledger;
  const Buffer buffer = ledger.charge(Purpose::shards, 1);
  const Buffer two = ledger.charge(Purpose::staging, kPageBytes + 1);
  EXPECT_EQ(buffer.bytes().size(), kPageBytes);
  EXPECT_EQ(two.bytes().size(), 2 * kPageBytes);
  Footprint expected;
  expected[Purpose::shards] = kPageBytes;
  expected[Purpose::staging] = 2 * kPageBytes;
  EXPECT_EQ(ledger.footprint(), expected);
}

TEST(Ledger, AtPeakIsTheFootprintOfTheHighestTotal) {
  Ledger ledger;
  Footprint expected;
  expected[Purpose::shards] = 2 * kPageBytes;
  expected[Purpose::staging] = kPageBytes;
  {
    const Buffer shards = ledger.charge(Purpose::shards, 2 * kPageBytes);
    const Buffer staging = ledger.charge(Purpose::staging, kPageBytes);
  }
  const Buffer later = ledger.charge(Purpose::grad, 2 * kPageBytes);
  EXPECT_EQ(ledger.at_peak(), expected);
  EXPECT_EQ(ledger.peak_bytes(), 3 * kPageBytes);
  EXPECT_EQ(ledger.footprint().total(), 2 * kPageBytes);
}

TEST(Ledger, MemoryIsZeroWritableAndAligned) {
  Ledger ledger;
  for (const uint64_t size : {kPageBytes, 2 * kMiB - kPageBytes, 2 * kMiB, 5 * kMiB + 3}) {
    Buffer buffer = ledger.charge(Purpose::shards, size, 3);
    const std::span<std::byte> bytes = buffer.bytes();
    EXPECT_EQ(bytes.size(), round_up(size, kPageBytes));
    EXPECT_TRUE(is_all_zero(bytes));
    std::fill(bytes.begin(), bytes.end(), std::byte{0x5a});
    const uint64_t alignment = size >= 2 * kMiB ? 2 * kMiB : kPageBytes;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % alignment, 0U);
  }
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(Ledger, APollThatThrowsAbortsTheCommit) {
  Ledger ledger;
  const uint64_t before = status_bytes("VmSize");
  std::atomic<int> polls = 0;
  const auto error = error_of([&] {
    ledger.charge(Purpose::shards, 40 * 64 * kMiB, 2, [&] {
      const int number = ++polls;
      if (number == 3) fail(Category::cancelled, "enough");
      // Gives the thread that throws time to raise the flag, on a loaded machine too.
      if (number > 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::cancelled);
  EXPECT_LE(polls, 10) << "of 160: the other thread ends its step and stops";
  EXPECT_EQ(ledger.footprint(), Footprint{});
  EXPECT_LT(status_bytes("VmSize"), before + kGiB);
}

TEST(Ledger, RequireRoomIsAllOrNothing) {
  Ledger ledger(4 * kPageBytes);
  const Charge plan = ledger.adopt(Purpose::plan, kPageBytes);
  Footprint needed;
  needed[Purpose::master] = kPageBytes;
  needed[Purpose::moments] = 2 * kPageBytes;
  ledger.require_room(needed, "a state");
  needed[Purpose::moments] += 1;
  const auto error = error_of([&] { ledger.require_room(needed, "a state"); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::budget);
  EXPECT_EQ(error->what_happened(),
            "a state takes 12.00 KiB: budget 16.00 KiB, needed 16.00 KiB, short by 1 B");
  EXPECT_EQ(error->facts().shortfall_bytes, 1U);
  EXPECT_EQ(ledger.footprint().total(), kPageBytes);
}

TEST(Ledger, ZeroBytesAreAnEmptyBuffer) {
  Ledger ledger(0);
  const Buffer buffer = ledger.charge(Purpose::shards, 0);
  EXPECT_TRUE(buffer.empty());
  EXPECT_TRUE(Buffer().empty());
  EXPECT_EQ(ledger.adopt(Purpose::plan, 0).bytes(), 0U);
  EXPECT_EQ(ledger.peak_bytes(), 0U);
}

TEST(Ledger, TheLimitItselfFits) {
  Ledger ledger(3 * kPageBytes);
  const Buffer buffer = ledger.charge(Purpose::shards, 2 * kPageBytes);
  const Charge adopted = ledger.adopt(Purpose::plan, kPageBytes);
  EXPECT_EQ(ledger.footprint().total(), ledger.limit_bytes());
  EXPECT_TRUE(error_of([&] { ledger.adopt(Purpose::plan, 1); }));
}

TEST(Ledger, ExceedingTheLimitMapsNothing) {
  Ledger ledger(kMiB);
  const Charge plan = ledger.adopt(Purpose::plan, 1000);
  const Charge header = ledger.adopt(Purpose::header, 2000);
  const uint64_t before = status_bytes("VmSize");
  const std::optional<Error> met = error_of([&] { ledger.charge(Purpose::shards, 64 * kGiB); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::budget);
  EXPECT_STREQ(met->what(),
               "BUDGET: no room for 64.00 GiB of shards: budget 1.00 MiB, needed 64.00 GiB, short "
               "by 64.00 GiB");
  EXPECT_EQ(met->facts().expected, "1048576");
  EXPECT_EQ(met->facts().got, "68719479736");
  EXPECT_EQ(met->facts().shortfall_bytes, 68719479736 - kMiB);
  ASSERT_EQ(met->facts().owners.size(), 2U);
  EXPECT_EQ(met->facts().owners[0].purpose, "header");
  EXPECT_EQ(met->facts().owners[1].bytes, 1000U);
  EXPECT_EQ(ledger.footprint().total(), 3000U);
  EXPECT_EQ(ledger.peak_bytes(), 3000U);
  EXPECT_LT(status_bytes("VmSize"), before + kGiB);
  SKIP_UNDER_SANITIZERS();
  EXPECT_LT(status_bytes("VmPeak"), before + 64 * kGiB) << "not even for a moment";
}

TEST(Ledger, AnOverflowingChargeIsABudgetError) {
  Ledger ledger(kMiB);
  const Charge plan = ledger.adopt(Purpose::plan, 1000);
  const std::optional<Error> met = error_of([&] { ledger.adopt(Purpose::plan, UINT64_MAX - 10); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::budget);
  EXPECT_EQ(ledger.footprint().total(), 1000U);
}

TEST(Ledger, AFailedMappingLeavesTheLedgerUnchanged) {
  Ledger ledger;
  const Buffer kept = ledger.charge(Purpose::shards, kPageBytes);
  for (const uint64_t size : {uint64_t{1} << 50, uint64_t{1} << 60, UINT64_MAX}) {
    const std::optional<Error> met =
        error_of([&] { ledger.charge(Purpose::shards, size - kPageBytes); });
    ASSERT_TRUE(met) << size;
    EXPECT_EQ(met->category(), Category::no_memory) << met->what();
    EXPECT_EQ(ledger.footprint().total(), kPageBytes);
    EXPECT_EQ(met->facts().got, fmt::format("a request for {} bytes of shards", size - kPageBytes));
    EXPECT_NE(met->what_happened().find("; 4.00 KiB are held already"), std::string::npos)
        << met->what();
    ASSERT_EQ(met->facts().owners.size(), 1U);
    EXPECT_EQ(met->facts().owners[0].bytes, kPageBytes);
  }
}

TEST(Ledger, AFailedCommitReturnsItsEntry) {
  Mapping mapping = Mapping::shared(kPageBytes);
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  if (madvise(mapping.bytes().data(), kPageBytes, kPopulateWrite) != 0) {
    GTEST_SKIP() << "this kernel commits pages only when they are touched, and can't refuse";
  }
  const std::span<std::byte> gone = mapping.bytes();
  mapping = Mapping();
  Ledger ledger;
  const std::optional<Error> met = error_of([&] { ledger.charge_shared(Purpose::window, gone); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::no_memory) << met->what();
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(Ledger, AMovedChargeIsReturnedOnce) {
  Ledger ledger;
  Charge a = ledger.adopt(Purpose::plan, 100);
  Charge b = std::move(a);
  EXPECT_EQ(ledger.footprint().total(), 100U);
  Charge c = ledger.adopt(Purpose::header, 7);
  c = std::move(b);
  EXPECT_EQ(c.purpose(), Purpose::plan);
  EXPECT_EQ(c.bytes(), 100U);
  EXPECT_EQ(ledger.footprint().total(), 100U);
  c = Charge();
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(Ledger, AMovedBufferIsReturnedOnce) {
  Ledger ledger;
  Buffer a = ledger.charge(Purpose::shards, 2 * kPageBytes);
  a.bytes()[0] = std::byte{7};
  Buffer b = std::move(a);
  EXPECT_TRUE(a.empty());  // NOLINT: a moved-from object is empty by contract
  EXPECT_EQ(b.bytes()[0], std::byte{7});
  Buffer c = ledger.charge(Purpose::grad, kPageBytes);
  c = std::move(b);
  EXPECT_EQ(ledger.footprint()[Purpose::grad], 0U);
  EXPECT_EQ(ledger.footprint()[Purpose::shards], 2 * kPageBytes);
  c = Buffer();
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(Ledger, ChargedMemoryIsCommittedUntouched) {
  SKIP_UNDER_SANITIZERS();
  Ledger ledger;
  for (const int threads : {1, 4}) {
    const uint64_t size = 64 * kMiB + 3 * kPageBytes;
    const uint64_t before = status_bytes("RssAnon");
    {
      const Buffer buffer = ledger.charge(Purpose::shards, size, threads);
      EXPECT_NEAR(static_cast<double>(status_bytes("RssAnon") - before), static_cast<double>(size),
                  static_cast<double>(kMiB));
    }
    EXPECT_LT(status_bytes("RssAnon"), before + kMiB);
  }
}

TEST(Ledger, ReservedMemoryIsCommittedOnWrite) {
  SKIP_UNDER_SANITIZERS();
  Ledger ledger(64 * kMiB);
  const uint64_t before = status_bytes("RssAnon");
  const Buffer reserved = ledger.reserve(Purpose::shards, 64 * kMiB);
  EXPECT_EQ(ledger.footprint()[Purpose::shards], 64 * kMiB);
  EXPECT_LT(status_bytes("RssAnon"), before + 16 * kMiB);
  std::fill(reserved.bytes().begin(), reserved.bytes().end(), std::byte{7});
  EXPECT_GE(status_bytes("RssAnon") + kMiB, before + 64 * kMiB);
  const auto error = error_of([&] { ledger.reserve(Purpose::shards, 1); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::budget);
}

// Permissions ("rw-p") of the mapping at an address, from /proc/self/maps; "" if there is none.
std::string permissions_at(const std::byte* address) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const size_t dash = line.find('-');
    if (at < std::stoull(line, nullptr, 16)) break;
    if (at >= std::stoull(line.substr(dash + 1), nullptr, 16)) continue;
    return line.substr(line.find(' ') + 1, 4);
  }
  return "";
}

// Whether a forked child that reads `address` is killed by SIGSEGV.
bool reading_kills_a_child(const std::byte* address) {
  const pid_t child = fork();
  if (child == 0) {
    const auto* const at = reinterpret_cast<const volatile std::byte*>(address);
    _exit(*at == std::byte{0} ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  // A sanitizer reports the fault and exits instead.
  return WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : kIsSanitized;
}

#ifdef __SANITIZE_THREAD__
#define SKIP_WHERE_CHILDREN_MAP_FIRST()                                                        \
  GTEST_SKIP() << "the thread sanitizer maps memory of its own in the child, in the excluded " \
                  "range"
#else
#define SKIP_WHERE_CHILDREN_MAP_FIRST() static_cast<void>(0)
#endif

TEST(Fork, ExcludedMemoryIsReservedInChildrenWithoutAccess) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  for (const uint64_t size : {kPageBytes, 4 * kMiB}) {
    const Buffer buffer = ledger.charge(Purpose::shards, size);
    const std::byte* const first = buffer.bytes().data();
    const std::byte* const last = first + size - 1;
    EXPECT_EQ(permissions_at(first), "rw-p");
    EXPECT_FALSE(is_excluded_here(first));
    EXPECT_TRUE(holds_in_a_child([&] {
      return permissions_at(first) == "---p" && permissions_at(last) == "---p" &&
             is_excluded_here(first) && is_excluded_here(last) && !is_excluded_here(last + 1) &&
             has_exclusions_here();
    }));
    EXPECT_TRUE(reading_kills_a_child(first));
    EXPECT_EQ(permissions_at(first), "rw-p");
    EXPECT_FALSE(has_exclusions_here());
  }
}

// Must fail if the addresses are free in the child: a later mapping could take them, and code that
// reads the excluded memory would read that mapping.
TEST(Fork, AChildNeverMapsMemoryInAnExcludedRange) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  constexpr uint64_t kSize = 8 * kMiB;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 100; ++i) buffers.push_back(ledger.reserve(Purpose::shards, kSize));
  const auto is_in_a_buffer = [&](const std::byte* at) {
    return std::any_of(buffers.begin(), buffers.end(), [at](const Buffer& buffer) {
      return at >= buffer.bytes().data() && at < buffer.bytes().data() + kSize;
    });
  };
  EXPECT_TRUE(holds_in_a_child([&] {
    for (int i = 0; i < 300; ++i) {
      for (const uint64_t size : {kPageBytes, kSize}) {
        void* const at =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED || is_in_a_buffer(static_cast<std::byte*>(at))) return false;
      }
    }
    return true;
  }));
}

TEST(Fork, AGrandchildFindsTheSameReservations) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  const Buffer buffer = ledger.charge(Purpose::shards, 4 * kMiB);
  const std::byte* const first = buffer.bytes().data();
  EXPECT_TRUE(holds_in_a_child([&] {
    const Buffer charged = ledger.charge(Purpose::staging, kPageBytes);
    return !is_excluded_here(charged.bytes().data()) && holds_in_a_child([&] {
      return permissions_at(first) == "---p" && is_excluded_here(first) &&
             permissions_at(charged.bytes().data()) == "---p" &&
             is_excluded_here(charged.bytes().data());
    });
  }));
}

// Python destroys inherited objects in a child too; that must not affect the parent.
TEST(Fork, ABufferDestroyedInAChildLeavesTheParentsIntact) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  for (const Fork fork : {Fork::excluded, Fork::shared, Fork::inherited}) {
    Buffer buffer = ledger.charge(Purpose::shards, 4 * kMiB, 1, kNoPoll, fork);
    std::fill(buffer.bytes().begin(), buffer.bytes().end(), std::byte{7});
    const Footprint footprint = ledger.footprint();
    const std::byte* const first = buffer.bytes().data();
    EXPECT_TRUE(holds_in_a_child([&] {
      buffer = {};
      return ledger.footprint() == Footprint{} && !is_excluded_here(first);
    }));
    EXPECT_EQ(ledger.footprint(), footprint);
    EXPECT_TRUE(std::all_of(buffer.bytes().begin(), buffer.bytes().end(),
                            [](std::byte b) { return b == std::byte{7}; }));
    buffer = {};
    EXPECT_EQ(ledger.footprint(), Footprint{});
  }
}

TEST(Fork, AReturnedRangeIsInheritedAgain) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  Buffer buffer = ledger.charge(Purpose::shards, 4 * kMiB);
  std::byte* const first = buffer.bytes().data();
  buffer = {};
  void* const again = mmap(first, kPageBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  ASSERT_EQ(again, first);
  *first = std::byte{3};
  EXPECT_TRUE(holds_in_a_child([&] { return *first == std::byte{3} && !is_excluded_here(first); }));
  munmap(again, kPageBytes);
}

TEST(Fork, SharedMemoryIsTheSameInParentAndChildren) {
  Ledger ledger;
  const Buffer buffer = ledger.charge(Purpose::shards, 4 * kMiB + 1, 2, kNoPoll, Fork::shared);
  const std::span<std::byte> bytes = buffer.bytes();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % (2 * kMiB), 0U);
  EXPECT_EQ(permissions_at(bytes.data()), "rw-s");
  EXPECT_EQ(ledger.footprint()[Purpose::shards], 4 * kMiB + kPageBytes);
  EXPECT_EQ(ledger.footprint()[Purpose::fork], 0U);
  bytes[0] = std::byte{1};
  EXPECT_TRUE(holds_in_a_child([&] {
    bytes.back() = std::byte{2};
    return bytes[0] == std::byte{1};
  }));
  EXPECT_EQ(bytes.back(), std::byte{2});
}

TEST(Fork, InheritedMemoryIsCopiedAndCountsTwice) {
  constexpr uint64_t kSize = 4 * kMiB;
  Ledger ledger(2 * kSize);
  const Buffer buffer = ledger.charge(Purpose::shards, kSize, 1, kNoPoll, Fork::inherited);
  EXPECT_EQ(ledger.footprint()[Purpose::shards], kSize);
  EXPECT_EQ(ledger.footprint()[Purpose::fork], kSize);
  EXPECT_EQ(ledger.peak_bytes(), 2 * kSize);
  buffer.bytes()[0] = std::byte{1};
  EXPECT_TRUE(holds_in_a_child([&] {
    const bool is_right = buffer.bytes()[0] == std::byte{1};
    buffer.bytes()[0] = std::byte{2};
    return is_right;
  }));
  EXPECT_EQ(buffer.bytes()[0], std::byte{1});
  const auto error = error_of([&] { ledger.adopt(Purpose::plan, 1); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::budget);
}

TEST(Fork, InheritedMemoryNeedsRoomForTheCopies) {
  Ledger ledger(2 * kMiB - 1);
  const auto error = error_of([&] { ledger.reserve(Purpose::shards, kMiB, Fork::inherited); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::budget);
  EXPECT_EQ(error->facts().shortfall_bytes, 1U);
  EXPECT_EQ(ledger.footprint(), Footprint{});
  EXPECT_FALSE(ledger.reserve(Purpose::shards, kMiB).empty());
}

TEST(Fork, SplittingAnInheritedEntrySplitsItsCopies) {
  Ledger ledger;
  Buffer buffer = ledger.charge(Purpose::shards, 2 * kMiB, 1, kNoPoll, Fork::inherited);
  {
    const Charge part = buffer.split(kMiB);
    EXPECT_EQ(ledger.footprint().total(), 4 * kMiB);
  }
  EXPECT_EQ(ledger.footprint()[Purpose::fork], kMiB);
  EXPECT_EQ(ledger.footprint()[Purpose::shards], kMiB);
}

// Must fail if a walk of the table ends after the first block of 64 rows.
TEST(Fork, ManyRangesAtOnceAreAllReserved) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  Ledger ledger;
  for (int round = 0; round < 2; ++round) {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 300; ++i) buffers.push_back(ledger.reserve(Purpose::init, kPageBytes));
    EXPECT_TRUE(holds_in_a_child([&] {
      return std::all_of(buffers.begin(), buffers.end(), [](const Buffer& buffer) {
        return is_excluded_here(buffer.bytes().data());
      });
    }));
  }
}

TEST(Fork, ForeignMemoryCanBeExcludedAndIncludedAgain) {
  SKIP_WHERE_CHILDREN_MAP_FIRST();
  constexpr size_t kSize = 4 * kPageBytes;
  auto* const data = static_cast<std::byte*>(
      mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  data[0] = std::byte{5};
  Exclusion exclusion({data, kSize});
  EXPECT_TRUE(holds_in_a_child([&] {
    if (!is_excluded_here(data)) return false;
    exclusion.undo();  // as when a tensor is freed in a child: its allocator reuses the range
    data[0] = std::byte{6};
    return !is_excluded_here(data) && permissions_at(data) == "rw-p";
  }));
  exclusion.undo();
  EXPECT_TRUE(holds_in_a_child([&] { return data[0] == std::byte{5}; }));
  munmap(data, kSize);
  const auto error = error_of([&] { const Exclusion none({data, kSize}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::no_memory);
  EXPECT_EQ(error->what_happened(),
            "cannot exclude 16384 bytes from forked children: Cannot allocate memory")
      << "madvise reports an unmapped range as ENOMEM";
}

TEST(Ledger, SharedMappingsAreSeenByForkedChildren) {
  Ledger ledger;
  const Mapping mapping = Mapping::shared(3 * kPageBytes + 1);
  ASSERT_EQ(mapping.bytes().size(), 4 * kPageBytes);
  const Charge charge =
      ledger.charge_shared(Purpose::window, mapping.bytes().subspan(kPageBytes, 2 * kPageBytes));
  EXPECT_EQ(charge.bytes(), 2 * kPageBytes);
  EXPECT_EQ(ledger.footprint()[Purpose::window], 2 * kPageBytes);
  EXPECT_TRUE(is_all_zero(mapping.bytes()));
  mapping.bytes()[kPageBytes] = std::byte{1};
  EXPECT_TRUE(holds_in_a_child([&] {
    mapping.bytes()[2 * kPageBytes] = std::byte{2};
    return mapping.bytes()[kPageBytes] == std::byte{1};
  }));
  EXPECT_EQ(mapping.bytes()[2 * kPageBytes], std::byte{2});
}

TEST(Ledger, SharedPartsAreCommittedSeparatelyWithoutTouch) {
  SKIP_UNDER_SANITIZERS();
  Ledger ledger;
  const Mapping mapping = Mapping::shared(32 * kMiB);
  const uint64_t before = status_bytes("RssShmem");
  const Charge charge =
      ledger.charge_shared(Purpose::window, mapping.bytes().subspan(8 * kMiB, 16 * kMiB));
  EXPECT_EQ(status_bytes("RssShmem") - before, 16 * kMiB);
}

TEST(Ledger, SharedPartsAreWholePages) {
  Ledger ledger;
  const Mapping mapping = Mapping::shared(2 * kPageBytes);
  const std::optional<Error> met = error_of(
      [&] { ledger.charge_shared(Purpose::window, mapping.bytes().subspan(1, kPageBytes)); });
  ASSERT_TRUE(met);
  EXPECT_EQ(met->category(), Category::internal);
  EXPECT_EQ(ledger.footprint(), Footprint{});
}

TEST(Ledger, ManyThreadsNeverExceedTheLimit) {
  constexpr uint64_t kLimit = 8 * kPageBytes;
  Ledger ledger(kLimit);
  run_workers(4, [&](int worker) {
    const auto purpose = worker % 2 == 0 ? Purpose::shards : Purpose::staging;
    for (uint64_t i = 0; i < 200; ++i) {
      try {
        const Buffer buffer = ledger.charge(purpose, (i % 4 + 1) * kPageBytes);
        const Charge adopted = ledger.adopt(Purpose::plan, i);
        buffer.bytes()[0] = std::byte{1};
        EXPECT_LE(ledger.footprint().total(), kLimit);
      } catch (const Error& error) {
        EXPECT_EQ(error.category(), Category::budget) << error.what();
      }
    }
  });
  EXPECT_EQ(ledger.footprint(), Footprint{});
  EXPECT_LE(ledger.peak_bytes(), kLimit);
  EXPECT_GE(ledger.peak_bytes(), 4 * kPageBytes);
}

TEST(Mapping, MovesAndUnmapsItself) {
  Mapping a = Mapping::shared(kPageBytes);
  std::byte* const at = a.bytes().data();
  Mapping b = std::move(a);
  EXPECT_TRUE(a.bytes().empty());  // NOLINT: a moved-from object is empty by contract
  EXPECT_EQ(b.bytes().data(), at);
  b = Mapping::shared(2 * kPageBytes);
  EXPECT_EQ(b.bytes().size(), 2 * kPageBytes);
  EXPECT_TRUE(Mapping::shared(0).bytes().empty());
  EXPECT_TRUE(error_of([] { Mapping::shared(uint64_t{1} << 60); }));
}

// Must fail if a part keeps its pages or its entry after give_up.
TEST(Buffer, ReleasesAPartBeforeTheRest) {
  Ledger ledger;
  Buffer arena = ledger.charge(Purpose::shards, 8 * kPageBytes);
  std::fill(arena.bytes().begin(), arena.bytes().end(), std::byte{7});
  {
    const Charge part = arena.split(3 * kPageBytes);
    EXPECT_EQ(ledger.footprint().total(), 8 * kPageBytes);
    // From the middle of page 1 to the middle of page 5: pages 2, 3 and 4 lie entirely in it.
    arena.give_up(arena.bytes().subspan(kPageBytes + 100, 4 * kPageBytes));
  }
  EXPECT_EQ(ledger.footprint().total(), 5 * kPageBytes);
  for (size_t page = 0; page < 8; ++page) {
    const std::byte* const first = arena.bytes().data() + page * kPageBytes;
    EXPECT_EQ(*first, page >= 2 && page < 5 ? std::byte{} : std::byte{7}) << page;
  }
  arena = {};
  EXPECT_EQ(ledger.footprint().total(), 0U);
}

TEST(Ledger, ANewLimitKeepsMemoryHeldAlready) {
  Ledger ledger;
  const Charge charge = ledger.adopt(Purpose::plan, 1000);
  ledger.set_limit(600);
  EXPECT_EQ(ledger.limit_bytes(), 600U);
  EXPECT_THROW(static_cast<void>(ledger.adopt(Purpose::plan, 1)), Error);
  ledger.set_limit(1100);
  EXPECT_EQ(ledger.adopt(Purpose::plan, 100).bytes(), 100U);
}

TEST(Ledger, MarkStartsANewPeak) {
  Ledger ledger;
  static_cast<void>(ledger.adopt(Purpose::plan, 5000));
  const Charge charge = ledger.adopt(Purpose::plan, 100);
  EXPECT_EQ(ledger.peak_since_mark(), 5000U);
  ledger.mark();
  EXPECT_EQ(ledger.peak_since_mark(), 100U);
  static_cast<void>(ledger.adopt(Purpose::plan, 40));
  EXPECT_EQ(ledger.peak_since_mark(), 140U);
  EXPECT_EQ(ledger.peak_bytes(), 5000U);
}

// Must fail if the return of an entry is not reported, or if one ledger replaces the figures of
// another.
TEST(Ledger, ReportsItsEntries) {
  const auto report = std::make_unique<SelfReport>();
  const Reporter reporter(*report, getpid());
  const auto& shards = report->held_bytes[static_cast<size_t>(Purpose::shards)];
  const auto& fork = report->held_bytes[static_cast<size_t>(Purpose::fork)];
  Ledger ledger(Ledger::kNoLimit, reporter), other(Ledger::kNoLimit, reporter);
  Charge rest = other.adopt(Purpose::shards, 100);
  {
    Buffer buffer = ledger.charge(Purpose::shards, 2 * kPageBytes, 1, kNoPoll, Fork::inherited);
    const Charge part = buffer.split(kPageBytes);
    EXPECT_EQ(shards.load(), 2 * kPageBytes + 100);
    EXPECT_EQ(fork.load(), 0U) << "what children may keep is no memory of this process";
  }
  EXPECT_EQ(shards.load(), 100U);
  rest = Charge();
  EXPECT_EQ(shards.load(), 0U);
}

TEST(Ledger, ARefusedChargeIsNotReported) {
  const auto report = std::make_unique<SelfReport>();
  Ledger ledger(kPageBytes, Reporter(*report, getpid()));
  EXPECT_TRUE(error_of([&] { ledger.charge(Purpose::shards, 2 * kPageBytes); }).has_value());
  EXPECT_EQ(report->held_bytes[static_cast<size_t>(Purpose::shards)].load(), 0U);
}

}  // namespace
}  // namespace modicum
