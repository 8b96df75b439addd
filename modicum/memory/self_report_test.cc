#include "modicum/memory/memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace modicum {
namespace {

// Catches: a forked child writes its parent's report; a running phase is overwritten; a report
// keeps the figures of the program before an exec.

// A table in this process's private memory.
class Table {
 public:
  Table() : memory_(new (std::align_val_t{4096}) std::byte[sizeof(SelfReports)]()) {}
  ~Table() { ::operator delete[](memory_, std::align_val_t{4096}); }
  Table(const Table&) = delete;
  std::span<std::byte> memory() const { return {memory_, sizeof(SelfReports)}; }

 private:
  std::byte* memory_;
};

size_t at(Purpose purpose) { return static_cast<size_t>(purpose); }

// The names of the phases that have not ended.
std::vector<std::string> lasting(const SelfReport& report) {
  std::vector<std::string> names;
  for (const SelfReport::Phase& phase : report.phases) {
    if (phase.number.load() != 0 && phase.end_ns.load() == 0) names.push_back(phase.name.text());
  }
  return names;
}

TEST(SelfReport, OnlyATableOfThisVersionIsFound) {
  const Table table;
  EXPECT_EQ(SelfReports::find_in(table.memory()), nullptr);
  SelfReports::make_in(table.memory());
  EXPECT_NE(SelfReports::find_in(table.memory()), nullptr);
  EXPECT_EQ(SelfReports::find_in(table.memory().first(8192)), nullptr);
}

TEST(SelfReport, SumsTheLedgersOfAProcess) {
  const Table table;
  SelfReport& report = *SelfReports::make_in(table.memory()).claim(getpid(), 7);
  const Reporter reporter(report, getpid());
  reporter.add(Purpose::shards, 100);
  reporter.add(Purpose::shards, 20);
  reporter.remove(Purpose::shards, 100);
  EXPECT_EQ(report.held_bytes[at(Purpose::shards)].load(), 20U);
  EXPECT_EQ(report.baseline_bytes.load(), 7U);
  EXPECT_EQ(report.rank.load(), -1);
}

TEST(SelfReport, AForkedChildWritesNothing) {
  const Table table;  // private memory: the child reports what it has written to its copy
  SelfReport& report = *SelfReports::make_in(table.memory()).claim(getpid(), 0);
  const Reporter reporter(report, getpid());
  reporter.add(Purpose::shards, 100);
  ReportedPhase phase(reporter, "load");
  const pid_t child = fork();
  if (child == 0) {
    reporter.remove(Purpose::shards, 100);
    reporter.set_budget(5);
    const ReportedPhase more(reporter, "step");
    phase.end();
    const bool is_same = report.held_bytes[at(Purpose::shards)].load() == 100 &&
                         report.budget_bytes.load() == 0 &&
                         lasting(report) == std::vector<std::string>{"load"};
    _exit(is_same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SelfReport, AProcessAfterAnExecBeginsAnew) {
  const Table table;
  SelfReports& reports = SelfReports::make_in(table.memory());
  SelfReport* const first = reports.claim(41, 0);
  SelfReport* const other = reports.claim(42, 0);
  ASSERT_NE(first, other);
  first->held_bytes[at(Purpose::shards)].store(100);
  first->phases_begun.store(3);
  EXPECT_EQ(reports.claim(41, 9), first);
  EXPECT_EQ(first->held_bytes[at(Purpose::shards)].load(), 0U);
  EXPECT_EQ(first->phases_begun.load(), 0U);
  EXPECT_EQ(first->baseline_bytes.load(), 9U);
}

TEST(SelfReport, MoreProcessesThanPlacesReportNothing) {
  const Table table;
  SelfReports& reports = SelfReports::make_in(table.memory());
  for (size_t i = 0; i < SelfReports::kMost; ++i) reports.pids[i].store(static_cast<int>(i) + 1);
  EXPECT_EQ(reports.claim(100'000, 0), nullptr);
  reports.pids[5].store(0);
  EXPECT_EQ(reports.claim(100'000, 0), &reports.reports[5]);
}

// An outer phase stays in the table while many inner ones overwrite each other.
TEST(SelfReport, APhaseThatLastsIsKept) {
  const Table table;
  SelfReport& report = *SelfReports::make_in(table.memory()).claim(getpid(), 0);
  const Reporter reporter(report, getpid());
  ReportedPhase outer(reporter, "train");
  for (size_t step = 0; step < 3 * SelfReport::kMaxPhases; ++step) {
    const ReportedPhase inner(reporter, "step");
  }
  EXPECT_EQ(lasting(report), std::vector<std::string>{"train"});
  outer.end();
  EXPECT_EQ(lasting(report), std::vector<std::string>{});
  EXPECT_EQ(report.phases_begun.load(), 1 + 3 * SelfReport::kMaxPhases);
}

TEST(SelfReport, MorePhasesThanPlacesAreLeftOut) {
  const Table table;
  SelfReport& report = *SelfReports::make_in(table.memory()).claim(getpid(), 0);
  const Reporter reporter(report, getpid());
  std::deque<ReportedPhase> all;
  for (size_t i = 0; i < SelfReport::kMaxPhases + 5; ++i) all.emplace_back(reporter, "deep");
  EXPECT_EQ(lasting(report).size(), SelfReport::kMaxPhases);
}

TEST(SelfReport, PromisesAreOfTheRankByPhase) {
  const Table table;
  SelfReport& report = *SelfReports::make_in(table.memory()).claim(getpid(), 0);
  const Reporter reporter(report, getpid());
  Promise promise{.phases = {{"load", std::vector<Footprint>(2)}, {"step", {{}, {}}}},
                  .node_of_rank = {0, 0}};
  promise.phases[1].of_rank[1][Purpose::moments] = 77;
  reporter.promise(promise, 1);
  EXPECT_EQ(report.rank.load(), 1);
  ASSERT_EQ(report.promised_phases.load(), 2U);
  EXPECT_EQ(report.promised[1].phase.text(), "step");
  EXPECT_EQ(report.promised[1].bytes[at(Purpose::moments)].load(), 77U);
}

TEST(SelfReport, LongNamesAreTruncated) {
  ReportedName name;
  name.set(std::string(200, 'x'));
  EXPECT_EQ(name.text(), std::string(127, 'x'));
  name.set(std::string(127, 'x') + "é");
  EXPECT_EQ(name.text(), std::string(127, 'x'));
  name.set(std::string(126, 'x') + "é");
  EXPECT_EQ(name.text(), std::string(126, 'x')) << "a character is not divided";
  name.set(std::string(124, 'x') + "語");
  EXPECT_EQ(name.text(), std::string(124, 'x') + "語");
  name.set(std::string(200, '\x80'));
  EXPECT_EQ(name.text(), std::string(127, '\x80')) << "not UTF-8";
  name.set("load");
  EXPECT_EQ(name.text(), "load");
}

TEST(Reporter, ReportsNothingWithoutAWatcher) {
  const Reporter reporter;
  reporter.add(Purpose::shards, 1);
  reporter.promise({}, 0);
  const ReportedPhase phase(reporter, "load");
}

}  // namespace
}  // namespace modicum
