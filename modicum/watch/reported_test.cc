#include "modicum/watch/reported.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/io/io.h"

namespace modicum {
namespace {

// Catches: owners whose sum is not the memory held; a phase without its end; unchecked numbers of a
// report; places of ended processes that stay taken; the report of a program that exec has
// replaced; a retained heap that counts as unexplained; a kind that holds more than the process;
// the baseline or the ledger counts again as a kind.

size_t at(Purpose purpose) { return static_cast<size_t>(purpose); }
size_t at(WatchOwner owner) { return static_cast<size_t>(owner); }

// Begins a phase in entry `place` of the report's phases.
void begin(SelfReport& report, size_t place, uint64_t number, const std::string& name,
           int64_t begin_ns) {
  SelfReport::Phase& phase = report.phases[place];
  phase.end_ns.store(0);
  phase.name.set(name);
  phase.begin_ns.store(begin_ns);
  phase.number.store(number);
}

// "NAME BEGIN-END; " for each phase, in milliseconds.
std::string text_of(const std::vector<WatchedPhase>& phases) {
  std::string text;
  for (const WatchedPhase& phase : phases) {
    text += phase.name + " " + std::to_string(static_cast<int>(phase.begin_s * 1000)) + "-" +
            std::to_string(static_cast<int>(phase.end_s * 1000)) + "; ";
  }
  return text;
}

TEST(OwnedMemory, IsDividedAmongTheLedgerAndTheRest) {
  ReportedMemory reported{.baseline_bytes = 2 * kMiB};
  reported.footprint[Purpose::shards] = 100 * kMiB;
  reported.footprint[Purpose::fork] = 50 * kMiB;  // a bound on copies of children, which hold them
  const OwnedMemory owned =
      Division()(110 * kMiB, {.copied_bytes = 3 * kMiB, .reported = &reported});
  EXPECT_EQ(owned.bytes(at(Purpose::process)), 2 * kMiB);
  EXPECT_EQ(owned.bytes(at(Purpose::shards)), 100 * kMiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::copies_since_fork)), 3 * kMiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::unexplained)), 5 * kMiB);
  EXPECT_EQ(owned.total_bytes(), 110 * kMiB);
}

// Glibc also counts free blocks that are not resident, so the reported heap may be too large.
TEST(OwnedMemory, RetainedHeapIsAPartOfTheRest) {
  ReportedMemory reported{.baseline_bytes = 2 * kMiB, .retained_heap_bytes = 9 * kMiB};
  reported.footprint[Purpose::shards] = 100 * kMiB;
  const OwnedMemory owned =
      Division()(120 * kMiB, {.copied_bytes = 3 * kMiB, .reported = &reported});
  EXPECT_EQ(owned.bytes(at(WatchOwner::copies_since_fork)), 3 * kMiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::retained_heap)), 9 * kMiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::unexplained)), 6 * kMiB);
  reported.retained_heap_bytes = UINT64_MAX;
  const OwnedMemory all = Division()(120 * kMiB, {.reported = &reported});
  EXPECT_EQ(all.bytes(at(Purpose::shards)), 100 * kMiB);
  EXPECT_EQ(all.bytes(at(WatchOwner::retained_heap)), 18 * kMiB);
  EXPECT_EQ(all.total_bytes(), 120 * kMiB);
}

TEST(OwnedMemory, BookedPagesThatAreNotWrittenAreNotHeld) {
  ReportedMemory reported{.baseline_bytes = 2 * kMiB};
  reported.footprint[Purpose::shards] = 500 * kMiB;
  reported.footprint[Purpose::staging] = 8 * kMiB;
  const OwnedMemory owned = Division()(100 * kMiB, {.reported = &reported});
  EXPECT_EQ(owned.bytes(at(Purpose::staging)), 8 * kMiB);
  EXPECT_EQ(owned.bytes(at(Purpose::shards)), 90 * kMiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::unexplained)), 0U);
}

// Children share the pages of the baseline, so the kernel counts only a part of them for the
// parent. The ledger's memory is excluded from the fork.
TEST(OwnedMemory, AForkTakesNothingFromALedgerThatIsWritten) {
  ReportedMemory reported{.baseline_bytes = 30 * kMiB};
  reported.footprint[Purpose::shards] = 100 * kMiB;
  Division division;
  EXPECT_EQ(division(90 * kMiB, {.reported = &reported}).bytes(at(Purpose::shards)), 60 * kMiB);
  EXPECT_EQ(division(131 * kMiB, {.reported = &reported}).bytes(at(Purpose::shards)), 100 * kMiB);
  const OwnedMemory forked = division(110 * kMiB, {.reported = &reported});
  EXPECT_EQ(forked.bytes(at(Purpose::shards)), 100 * kMiB);
  EXPECT_EQ(forked.bytes(at(Purpose::process)), 10 * kMiB);
  reported.footprint[Purpose::moments] = 200 * kMiB;  // booked, not written
  const OwnedMemory booked = division(115 * kMiB, {.reported = &reported});
  EXPECT_EQ(booked.bytes(at(Purpose::process)), 10 * kMiB);
  EXPECT_EQ(booked.total_bytes(), 115 * kMiB);
  EXPECT_EQ(division(310 * kMiB, {.reported = &reported}).bytes(at(Purpose::moments)), 200 * kMiB);
}

TEST(OwnedMemory, OfAProcessWithoutALedgerIsHeldOrCopied) {
  const OwnedMemory owned = Division()(100 * kKiB, {.copied_bytes = 30 * kKiB});
  EXPECT_EQ(owned.bytes(at(WatchOwner::copies_since_fork)), 30 * kKiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::unattributed)), 70 * kKiB);
  EXPECT_EQ(Division()(10 * kKiB, {.copied_bytes = 30 * kKiB}).total_bytes(), 10 * kKiB);
}

MemoryKinds kinds_of(uint64_t heap_mib, uint64_t anonymous_mib, uint64_t shared_mib = 0) {
  MemoryKinds kinds;
  kinds[MemoryKind::malloc_heap] = heap_mib * kMiB;
  kinds[MemoryKind::anonymous] = anonymous_mib * kMiB;
  kinds[MemoryKind::shared_memory] = shared_mib * kMiB;
  return kinds;
}

// "30 60 10": MiB of the main heap, of large blocks and of shared memory.
std::string kinds_in(const OwnedMemory& owned) {
  std::string text;
  for (const MemoryKind kind :
       {MemoryKind::malloc_heap, MemoryKind::anonymous, MemoryKind::shared_memory}) {
    text += (text.empty() ? "" : " ") + std::to_string(owned.bytes(owner_of(kind)) / kMiB);
  }
  return text;
}

// In a fork both processes count a part of the shared pages: the kinds are cut in proportion.
TEST(OwnedMemory, OfAProcessWithoutALedgerIsDividedByKind) {
  const MemoryKinds first = kinds_of(30, 60, 25);
  Division division;
  EXPECT_EQ(kinds_in(division(100 * kMiB, {.shared_bytes = 10 * kMiB, .kinds = &first})),
            "30 60 10");
  EXPECT_EQ(kinds_in(division(120 * kMiB, {.shared_bytes = 10 * kMiB, .kinds = &first})),
            "30 80 10")
      << "large blocks, until a reading says otherwise";
  EXPECT_EQ(kinds_in(division(55 * kMiB, {.shared_bytes = 10 * kMiB, .kinds = &first})),
            "15 30 10");
  const MemoryKinds second = kinds_of(50, 62, 25);
  EXPECT_EQ(kinds_in(division(130 * kMiB, {.shared_bytes = 10 * kMiB, .kinds = &second})),
            "58 62 10")
      << "the heap has grown most";
}

TEST(OwnedMemory, BesideALedgerIsWhatEachKindHasGained) {
  ReportedMemory reported{.baseline_bytes = 25 * kMiB};
  reported.footprint[Purpose::shards] = 50 * kMiB;
  Division division;
  const MemoryKinds begin = kinds_of(10, 15);
  const OwnedMemory first = division(25 * kMiB, {.reported = &reported, .kinds = &begin});
  EXPECT_EQ(first.bytes(at(Purpose::process)), 25 * kMiB);
  const MemoryKinds now = kinds_of(30, 70);
  const OwnedMemory owned = division(100 * kMiB, {.reported = &reported, .kinds = &now});
  EXPECT_EQ(owned.bytes(at(Purpose::process)), 25 * kMiB);
  EXPECT_EQ(owned.bytes(at(Purpose::shards)), 50 * kMiB);
  EXPECT_EQ(kinds_in(owned), "20 5 0");
  reported.retained_heap_bytes = 12 * kMiB;
  const OwnedMemory freed = division(100 * kMiB, {.reported = &reported, .kinds = &now});
  EXPECT_EQ(freed.bytes(at(WatchOwner::retained_heap)), 12 * kMiB);
  EXPECT_EQ(kinds_in(freed), "8 5 0");
}

TEST(OwnedMemory, SharedMemoryIsBesideALedgerThatFitsIntoPrivateMemory) {
  ReportedMemory reported{.baseline_bytes = 10 * kMiB};
  reported.footprint[Purpose::shards] = 50 * kMiB;
  for (const bool is_shared : {false, true}) {
    Division division;
    const MemoryKinds begin = kinds_of(0, 10);
    division(10 * kMiB, {.reported = &reported, .kinds = &begin});
    const MemoryKinds now = is_shared ? kinds_of(0, 15, 50) : kinds_of(0, 60, 5);
    EXPECT_EQ(kinds_in(division(65 * kMiB, {.reported = &reported, .kinds = &now})),
              is_shared ? "0 5 0" : "0 0 5");
  }
}

TEST(OwnedMemory, AnyNumbersAddUpToWhatIsHeld) {
  ReportedMemory reported{.baseline_bytes = UINT64_MAX};
  for (uint64_t& bytes : reported.footprint.bytes) bytes = UINT64_MAX - 7;
  EXPECT_EQ(
      Division()(77 * kMiB, {.copied_bytes = UINT64_MAX, .reported = &reported}).total_bytes(),
      77 * kMiB);
  reported.baseline_bytes = 0;
  EXPECT_EQ(
      Division()(77 * kMiB, {.copied_bytes = UINT64_MAX, .reported = &reported}).total_bytes(),
      77 * kMiB);
  EXPECT_EQ(Division()(0, {.reported = &reported}).total_bytes(), 0U);
}

TEST(ReportedProcesses, HaveTheirPhasesWithBeginAndEnd) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, kNsPerSecond);
  SelfReport& report = *table.claim(7, 0);
  report.rank.store(3);
  begin(report, 0, 1, "load", 1 * kNsPerSecond + 100 * kNsPerMs);
  const std::vector<int> alive = {7};
  reported.read(1 * kNsPerSecond + 200 * kNsPerMs, alive);
  EXPECT_EQ(reported.phase_of(7).name, "load");
  EXPECT_EQ(reported.memory_of(7)->rank, 3);
  report.phases[0].end_ns.store(1 * kNsPerSecond + 300 * kNsPerMs);
  // A phase that begins and ends between two readings.
  begin(report, 1, 2, "step", 1 * kNsPerSecond + 310 * kNsPerMs);
  report.phases[1].end_ns.store(1 * kNsPerSecond + 350 * kNsPerMs);
  begin(report, 2, 3, "save", 1 * kNsPerSecond + 360 * kNsPerMs);
  reported.read(1 * kNsPerSecond + 400 * kNsPerMs, alive);
  EXPECT_EQ(reported.phase_of(7).name, "save");
  EXPECT_EQ(text_of(reported.phases(1 * kNsPerSecond + 500 * kNsPerMs)),
            "load 100-300; step 310-350; save 360-500; ");
}

TEST(ReportedProcesses, ThePhaseOfAProcessThatWasKilledIsKnown) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& report = *table.claim(7, 0);
  report.held_bytes[at(Purpose::shards)].store(5 * kMiB);
  begin(report, 0, 1, "train", 10 * kNsPerMs);
  begin(report, 1, 2, "load", 20 * kNsPerMs);
  reported.read(30 * kNsPerMs, std::vector<int>{7});
  reported.read(40 * kNsPerMs, {});
  EXPECT_EQ(reported.phase_of(7).name, "load");
  EXPECT_EQ(reported.memory_of(7)->footprint[Purpose::shards], 5 * kMiB);
  EXPECT_EQ(text_of(reported.phases(90 * kNsPerMs)), "train 10-40; load 20-40; ");
  EXPECT_EQ(table.pids[0].load(), 0) << "its place is free";
}

// It has begun after the tree was walked, so it is not among the known ones yet.
TEST(ReportedProcesses, AProcessThatHasJustBegunKeepsItsPlace) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& first = *table.claim(7, 0);
  begin(first, 0, 1, "load", 10 * kNsPerMs);
  bool is_alive = true;
  const auto ask = [&](int pid) { return pid == 7 && is_alive; };
  reported.read(20 * kNsPerMs, {}, ask);
  EXPECT_EQ(table.pids[0].load(), 7);
  EXPECT_NE(table.claim(8, 0), &first) << "two processes would write one report";
  reported.read(30 * kNsPerMs, std::vector<int>{7, 8}, ask);
  EXPECT_EQ(text_of(reported.phases(40 * kNsPerMs)), "load 10-40; ");
  is_alive = false;
  reported.read(50 * kNsPerMs, std::vector<int>{8}, ask);
  EXPECT_EQ(table.pids[0].load(), 0);
  EXPECT_EQ(text_of(reported.phases(60 * kNsPerMs)), "load 10-50; ");
}

TEST(ReportedProcesses, ReusedPidsAndPlacesAreOtherProcesses) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& first = *table.claim(7, 0);
  begin(first, 0, 1, "load", 10 * kNsPerMs);
  reported.read(20 * kNsPerMs, std::vector<int>{7});
  SelfReport& again = *table.claim(7, 0);  // after an exec, or for a new process of the same pid
  ASSERT_EQ(&first, &again);
  again.begin_ns.store(25 * kNsPerMs);
  begin(again, 0, 1, "save", 30 * kNsPerMs);
  reported.read(40 * kNsPerMs, std::vector<int>{7});
  EXPECT_EQ(reported.phase_of(7).name, "save");
  EXPECT_EQ(text_of(reported.phases(50 * kNsPerMs)), "load 10-40; save 30-50; ");
}

// After an exec the next program may make no report, or begin its own.
TEST(ReportedProcesses, AProgramBeforeAnExecHasEnded) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  bool is_same = true;
  ReportedProcesses reported(table, 0, [&](int) { return is_same; });
  const std::vector<int> alive = {7};
  SelfReport& first = *table.claim(7, 0);
  first.begin_ns.store(5 * kNsPerMs);
  first.held_bytes[at(Purpose::shards)].store(5 * kMiB);
  begin(first, 0, 1, "load", 10 * kNsPerMs);
  reported.read(20 * kNsPerMs, alive);
  ASSERT_TRUE(reported.memory_of(7).has_value());
  is_same = false;
  reported.read(30 * kNsPerMs, alive);
  reported.read(40 * kNsPerMs, alive);
  EXPECT_EQ(reported.memory_of(7), std::nullopt);
  EXPECT_EQ(reported.phase_of(7).name, "");
  is_same = true;  // the next program has marked the table, but has not begun its report
  reported.read(50 * kNsPerMs, alive);
  EXPECT_EQ(reported.memory_of(7), std::nullopt);
  SelfReport& next = *table.claim(7, 0);
  next.begin_ns.store(60 * kNsPerMs);
  next.held_bytes[at(Purpose::shards)].store(7 * kMiB);
  begin(next, 0, 1, "save", 70 * kNsPerMs);
  reported.read(80 * kNsPerMs, alive);
  EXPECT_EQ(reported.memory_of(7)->footprint[Purpose::shards], 7 * kMiB);
  EXPECT_EQ(text_of(reported.phases(90 * kNsPerMs)), "load 10-30; save 70-90; ");
}

TEST(ReportedProcesses, APhaseHasItsPromise) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& report = *table.claim(7, 0);
  report.promised[1].phase.set("step");
  report.promised[1].bytes[at(Purpose::moments)].store(70);
  report.promised[1].bytes[at(Purpose::process)].store(5);
  report.promised[1].bytes[at(Purpose::page_tables)].store(1000);
  report.promised_phases.store(2);
  begin(report, 0, 1, "step", 10 * kNsPerMs);
  begin(report, 1, 2, "other", 20 * kNsPerMs);
  reported.read(30 * kNsPerMs, std::vector<int>{7});
  const auto phases = reported.phases(40 * kNsPerMs);
  ASSERT_EQ(phases.size(), 2U);
  EXPECT_EQ(phases[0].promised_bytes, 75U);
  EXPECT_EQ(phases[1].promised_bytes, std::nullopt);
}

TEST(ReportedProcesses, WhateverIsWrittenIsBounded) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& report = *table.claim(7, UINT64_MAX);
  report.promised_phases.store(UINT32_MAX);
  report.phases_begun.store(UINT64_MAX);
  for (size_t i = 0; i < SelfReport::kMaxPhases; ++i) {
    begin(report, i, UINT64_MAX - i, "\n\x1b[31m", i % 2 == 0 ? INT64_MAX : INT64_MIN);
    report.phases[i].end_ns.store(i % 3 == 0 ? INT64_MIN : INT64_MAX);
  }
  const std::vector<int> alive = {7};
  reported.read(50 * kNsPerMs, alive);
  for (const WatchedPhase& phase : reported.phases(60 * kNsPerMs)) {
    EXPECT_GE(phase.begin_s, 0);
    EXPECT_GE(phase.end_s, phase.begin_s);
    EXPECT_LE(phase.end_s, 0.06);
    EXPECT_EQ(phase.name.find('\x1b'), std::string::npos);
  }
}

// A training of days has many phases `step`: they are joined, so that the first `load` is kept.
TEST(ReportedProcesses, ManyPhasesOfOneNameAreJoined) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  ReportedProcesses reported(table, 0);
  SelfReport& report = *table.claim(7, 0);
  const std::vector<int> alive = {7};
  begin(report, 0, 1, "load", 0);
  report.phases[0].end_ns.store(kNsPerMs);
  for (int64_t step = 1; step <= 10'000; ++step) {
    const size_t place = static_cast<size_t>(step) % SelfReport::kMaxPhases;
    begin(report, place, static_cast<uint64_t>(step) + 1, "step", step * kNsPerMs);
    report.phases[place].end_ns.store((step + 1) * kNsPerMs);
    reported.read((step + 1) * kNsPerMs, alive);
  }
  const auto phases = reported.phases(20'000 * kNsPerMs);
  EXPECT_LE(phases.size(), ReportedProcesses::kMaxPhases);
  EXPECT_EQ(phases.front().name, "load");
  EXPECT_DOUBLE_EQ(phases.back().end_s, 10.001);
}

}  // namespace
}  // namespace modicum
