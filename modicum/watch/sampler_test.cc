#include "modicum/watch/sampler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "modicum/base/clock_double.h"
#include "modicum/io/io.h"
#include "modicum/probe/machine_double.h"
#include "modicum/watch/deaths.h"

namespace modicum {
namespace {

// Catches: thinning loses the peak; a process with a reused pid counts as the earlier one; the
// memory of an ended process still counts; owners whose sum is not the memory of the process; a
// peak between two samples that is not reported; few samples at the beginning; copies are read only
// if their CPU time is left, or at any cost; shared memory that was freed still counts; the memory
// of a process counts again for the child that it starts; a kill is no sample, or counts shared
// pages in full; the kinds of a process are read in each sample, or never again.

constexpr int kWatcher = 10;

size_t at(Purpose purpose) { return static_cast<size_t>(purpose); }
size_t at(WatchOwner owner) { return static_cast<size_t>(owner); }

struct Process {
  int parent = kWatcher;
  std::string name = "python3";
  uint64_t anon_kib = 0;
  uint64_t file_kib = 0;
  uint64_t huge_kib = 0;
  std::string variables;     // its environment, as "RANK=1"
  uint64_t shared_kib = 0;   // of the anonymous memory, with one other process since a fork
  uint64_t faults = 0;       // minor page faults
  uint64_t highest_kib = 0;  // VmHWM, if above the current RSS
  uint64_t shmem_kib = 0;    // of which no other process has a part
};

// A sampler and the /proc that it reads.
class SampledTree {
 public:
  // `reading_ns`: the CPU time grows by this much with each reading.
  explicit SampledTree(SamplerOptions options = {}, int64_t reading_ns = kNsPerMs / 20) {
    options.root_pid = kWatcher;
    options.root = machine_.root();
    reading_ns_ = reading_ns;
    options.cpu_ns = [this] { return cpu_ns_ += reading_ns_; };
    sampler_.emplace(clock_, options);
  }

  void put(int pid, const Process& process) {
    processes_[pid] = process;
    const std::string directory = fmt::format("/proc/{}/", pid);
    machine_.put(directory + "status",
                 fmt::format("Name:\t{}\nState:\tS (sleeping)\nPPid:\t{}\nVmHWM:\t{} kB\n"
                             "RssAnon:\t{} kB\nRssFile:\t{} kB\nRssShmem:\t{} kB\n",
                             process.name, process.parent,
                             std::max(process.highest_kib,
                                      process.anon_kib + process.file_kib + process.shmem_kib),
                             process.anon_kib, process.file_kib, process.shmem_kib));
    machine_.put(directory + "smaps_rollup",
                 fmt::format("Pss_Anon: {} kB\nPss_Shmem: {} kB\nAnonHugePages: {} kB\n",
                             process.anon_kib - process.shared_kib / 2, process.shmem_kib,
                             process.huge_kib));
    machine_.put(directory + "stat",
                 fmt::format("{} ({}) S 1 2 3 4 -1 6 {} 8\n", pid, process.name, process.faults));
    machine_.put(directory + "environ", process.variables);
    put_children();
  }
  void end(int pid) {
    processes_.erase(pid);
    std::filesystem::remove_all(fmt::format("{}/proc/{}", machine_.root(), pid));
    put_children();
  }
  // Lets `seconds` pass, then samples.
  void sample_after(double seconds = 0.02) {
    clock_.advance_ns(static_cast<int64_t>(seconds * kNsPerSecond));
    sampler_->sample();
  }
  void set_reading_ns(int64_t reading_ns) { reading_ns_ = reading_ns; }
  WatchRecord finish() {
    WatchRecord record;
    sampler_->finish(record);
    return record;
  }

  Machine& machine() { return machine_; }
  FakeClock& clock() { return clock_; }
  TreeSampler& sampler() { return *sampler_; }

 private:
  void put_children() {
    std::map<int, std::string> children = {{kWatcher, ""}};
    for (const auto& [pid, process] : processes_) children[pid] += "";  // an entry for each
    for (const auto& [pid, process] : processes_)
      children[process.parent] += fmt::format("{} ", pid);
    for (const auto& [pid, text] : children) {
      machine_.put(fmt::format("/proc/{}/task/{}/children", pid, pid), text);
    }
    machine_.put("/proc/loadavg", fmt::format("0 0 0 1/9 {}\n", ++last_pid_));
  }

  Machine machine_;
  FakeClock clock_;
  int64_t cpu_ns_ = 0;
  int64_t reading_ns_ = 0;
  int last_pid_ = 100;
  std::map<int, Process> processes_;
  std::optional<TreeSampler> sampler_;
};

uint64_t sum_of(const WatchSample& sample) {
  uint64_t sum = sample.others.total_bytes();
  for (const WatchSample::Share& share : sample.shares) sum += share.owned.total_bytes();
  return sum;
}

TEST(Sampler, ThinningKeepsThePeak) {
  SampledTree tree;
  for (int i = 0; i < 1500; ++i) {
    tree.put(11, {.anon_kib = i == 1234 ? 30'000U : 10'000U + static_cast<uint64_t>(i % 5)});
    tree.sample_after();
  }
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.peak_bytes, 30'000 * kKiB);
  ASSERT_NE(record.peak(), nullptr);
  EXPECT_EQ(record.peak()->held_bytes, record.peak_bytes);
  EXPECT_DOUBLE_EQ(record.peak()->at_s, record.peak_at_s);
  EXPECT_LE(record.samples.size(), Timeline::kMaxSamples);
  for (const WatchSample& sample : record.samples) ASSERT_EQ(sum_of(sample), sample.held_bytes);
}

TEST(Sampler, WhatCameAndWentBetweenTwoSamplesIsInThePeakAtMost) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 10'000, .file_kib = 500});
  tree.put(12, {.anon_kib = 20'000});
  tree.sample_after();
  tree.put(11, {.anon_kib = 12'000, .file_kib = 500, .highest_kib = 18'500});
  tree.put(12, {.anon_kib = 15'000, .highest_kib = 21'000});
  tree.sample_after();
  // VmHWM is unchanged, so no process has exceeded its samples since.
  tree.put(11, {.anon_kib = 13'000, .file_kib = 500, .highest_kib = 18'500});
  tree.put(12, {.anon_kib = 18'000, .highest_kib = 21'000});
  tree.sample_after();
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.peak_bytes, 31'000 * kKiB);
  // The first sample, 18'500 - (12'000 + 500) of process 11, and 21'000 - 20'000 of process 12.
  EXPECT_EQ(record.peak_at_most_bytes, (30'000 + 6'000 + 1'000) * kKiB);
  EXPECT_FALSE(record.is_at_most_by_copies);
  EXPECT_TRUE(record.may_have_missed_peak());
}

TEST(Sampler, APeakThatTheSamplesShowIsTheMost) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1'000});
  tree.sample_after();
  tree.put(11, {.anon_kib = 90'000});
  tree.sample_after();
  tree.put(11, {.anon_kib = 30'000, .highest_kib = 90'000});
  tree.sample_after();
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.peak_at_most_bytes, 90'000 * kKiB);
  EXPECT_FALSE(record.may_have_missed_peak());
}

// The growth of a process after its last sample shows in its ru_maxrss.
TEST(Sampler, TheGrowthOfAnEndedProcessIsInThePeakAtMost) {
  SampledTree tree({.forked_rss_bytes = 9'000 * kKiB});
  tree.put(11, {.anon_kib = 10'000});
  tree.sample_after();
  tree.end(11);
  tree.sampler().note_end(11, 8'000 * kKiB);  // the watcher's own, before exec
  tree.sampler().note_end(11, 50'000 * kKiB);
  tree.sample_after();
  EXPECT_EQ(tree.finish().peak_at_most_bytes, 50'000 * kKiB);
}

TEST(Sampler, EachRankOfALauncherThatEndedMayHaveReachedTheMaximum) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1'000});
  tree.put(12, {.parent = 11, .anon_kib = 20'000});
  tree.put(13, {.parent = 11, .anon_kib = 30'000});
  tree.sample_after();
  for (const int pid : {11, 12, 13}) tree.end(pid);
  tree.sampler().note_end(11, 32'000 * kKiB);
  tree.sample_after();
  EXPECT_EQ(tree.finish().peak_at_most_bytes, (1'000 + 2 * 32'000) * kKiB);
}

TEST(Sampler, CreditPaysForMoreSamplesAtTheBeginning) {
  SampledTree tree({}, 4 * kNsPerMs);
  tree.put(11, {.anon_kib = 1'000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().pause_ns(), 4 * kNsPerMs / 0.01);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  EXPECT_EQ(tree.sampler().pause_ns(), 4 * kNsPerMs / 0.0025);
}

TEST(Sampler, AProcessOfAReusedPidIsAnotherOne) {
  SampledTree tree;
  tree.put(11, {.name = "first", .anon_kib = 5000});
  tree.sample_after();
  tree.end(11);
  tree.sample_after();
  tree.put(11, {.name = "second", .anon_kib = 700});
  tree.sample_after();
  const WatchRecord record = tree.finish();
  ASSERT_EQ(record.processes.size(), 2U);
  EXPECT_EQ(record.processes[0].name, "first");
  EXPECT_EQ(record.processes[0].peak_bytes, 5000 * kKiB);
  EXPECT_EQ(record.processes[1].name, "second");
  EXPECT_EQ(record.processes[1].peak_bytes, 700 * kKiB);
  EXPECT_GT(record.processes[1].begin_s, record.processes[0].end_s);
}

// A launcher that replaces itself by a trainer (exec).
TEST(Sampler, AProcessHasTheNameAndRankOfItsLastProgram) {
  SampledTree tree;
  tree.put(11, {.name = "sh", .anon_kib = 100});
  tree.sample_after();
  tree.put(11, {.name = "python3", .anon_kib = 300, .variables = "RANK=3"});
  tree.sample_after();
  const WatchRecord record = tree.finish();
  ASSERT_EQ(record.processes.size(), 1U);
  EXPECT_EQ(record.processes[0].name, "python3");
  EXPECT_EQ(record.processes[0].rank, 3);
}

TEST(Sampler, HugePagesAreReadWhenMemoryIsSteady) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 100});
  tree.sample_after();
  tree.put(11, {.anon_kib = 100'000, .huge_kib = 90'112});
  for (int i = 0; i < 4; ++i) tree.sample_after();
  EXPECT_EQ(tree.sampler().find(11)->huge_page_bytes, 0U) << "memory may still grow";
  for (int i = 0; i < 4; ++i) tree.sample_after();
  EXPECT_EQ(tree.sampler().find(11)->huge_page_bytes, 90'112 * kKiB);
  tree.put(11, {.anon_kib = 100'000, .huge_kib = 2048});
  for (int i = 0; i < 9; ++i) tree.sample_after();
  EXPECT_EQ(tree.finish().processes.at(0).huge_page_bytes, 90'112 * kKiB) << "the most";
}

// A fault for each page shows that the pages are small.
TEST(Sampler, HugePagesAreNotReadWhereThereAreNone) {
  for (const uint64_t faults : {23'000, 25'000}) {
    SampledTree tree;
    tree.put(11, {.anon_kib = 100});
    tree.sample_after();
    tree.put(11, {.anon_kib = 100'000, .huge_kib = 4096, .faults = faults});
    for (int i = 0; i < 10; ++i) tree.sample_after();
    EXPECT_EQ(tree.sampler().find(11)->huge_page_bytes, (faults < 24'000 ? 4096 : 0) * kKiB);
  }
}

TEST(Sampler, SharedMemoryThatWasFreedDoesNotCount) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1'000, .shmem_kib = 30'000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().last().held_bytes, 31'000 * kKiB);
  tree.put(11, {.anon_kib = 1'000, .highest_kib = 31'000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().last().held_bytes, 1'000 * kKiB);
  tree.put(11, {.anon_kib = 29'000, .highest_kib = 31'000});
  for (int i = 0; i < 20; ++i) tree.sample_after();
  EXPECT_EQ(tree.finish().peak_bytes, 31'000 * kKiB);
}

// Between vfork(2) or posix_spawn(3) and its exec, a child shows the memory of its parent.
TEST(Sampler, AChildInItsParentsMemoryHoldsNothing) {
  SampledTree tree;
  const Process parent{.anon_kib = 100'000, .file_kib = 500, .highest_kib = 120'000};
  tree.put(11, parent);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  Process child = parent;
  child.parent = 11;
  tree.put(12, child);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  EXPECT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  tree.put(12, {.parent = 11, .name = "true", .anon_kib = 700});
  for (int i = 0; i < 20; ++i) tree.sample_after();
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.peak_bytes, 100'700 * kKiB);
  EXPECT_EQ(record.processes.at(1).peak_bytes, 700 * kKiB);
  EXPECT_EQ(record.processes.at(1).peak_rss_bytes, 700 * kKiB);
}

// Pss of 10 GiB of small pages takes half a second to read, more than the credit at the beginning.
TEST(Sampler, HugePagesOfALargeTreeAreNotReadBeforeThereIsCredit) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 100});
  tree.sample_after();
  tree.put(11, {.anon_kib = 10 * kMiB, .huge_kib = 2048});
  for (int i = 0; i < 20; ++i) tree.sample_after();
  EXPECT_EQ(tree.finish().processes.at(0).huge_page_bytes, 0U);
}

// Two processes that share their memory since a fork, until one writes all of it. Two expensive
// samples leave a debt below kMaxDebtNs (1 s), eight a larger one.
TEST(Sampler, CopiesAreReadOnCreditUpToALimit) {
  for (const int samples : {2, 8}) {
    SampledTree tree;
    const Process shared{.anon_kib = 100'000, .shared_kib = 100'000, .faults = 10};
    tree.put(11, shared);
    tree.put(12, shared);
    for (int i = 0; i < 20; ++i) tree.sample_after();
    ASSERT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
    tree.set_reading_ns(100 * kNsPerMs);  // 0.2 s per sample
    for (int i = 0; i < samples; ++i) tree.sample_after();
    tree.put(11, {.anon_kib = 100'000, .faults = 25'010});
    tree.put(12, {.anon_kib = 100'000, .faults = 10});
    tree.sample_after(0.1);
    tree.sample_after(10);
    const uint64_t held_bytes = tree.sampler().last().held_bytes;
    EXPECT_EQ(held_bytes, (samples == 2 ? 200'000 : 100'000) * kKiB);
    const WatchRecord record = tree.finish();
    EXPECT_EQ(record.peak_at_most_bytes, 200'000 * kKiB);
    EXPECT_TRUE(record.is_at_most_by_copies);
  }
}

// One of the two processes alone costs more than may be owed. Until the other one is read, too, the
// estimate is the old one: a half of what they shared is not missing.
TEST(Sampler, AnExactReadingStopsBetweenProcesses) {
  SampledTree tree;
  const Process shared{.anon_kib = 100'000, .shared_kib = 100'000, .faults = 10};
  tree.put(11, shared);
  tree.put(12, shared);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  ASSERT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  tree.put(11, {.anon_kib = 100'000, .shared_kib = 40'000, .faults = 25'010});
  tree.put(12, {.anon_kib = 100'000, .shared_kib = 40'000, .faults = 10});
  tree.set_reading_ns(800 * kNsPerMs);
  tree.sample_after(0.1);
  tree.set_reading_ns(kNsPerMs / 20);
  tree.sample_after(0.1);
  EXPECT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 100'000 * kKiB);
  tree.sample_after(400);
  EXPECT_EQ(tree.sampler().last().held_bytes, 160'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 0U);
  for (const WatchSample& sample : tree.finish().samples) {
    EXPECT_GE(sample.held_bytes, 100'000 * kKiB);
  }
}

// A forked child is large when it is found; there was no CPU time yet to read it.
TEST(Sampler, AProcessThatWasNeverReadIsInThePeakAtMost) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 100'000});
  for (int i = 0; i < 20; ++i) tree.sample_after();
  tree.set_reading_ns(kNsPerSecond);
  tree.sample_after();
  tree.set_reading_ns(0);
  tree.put(12, {.parent = 11, .anon_kib = 100'000, .file_kib = 9, .shared_kib = 80'000});
  tree.put(11, {.anon_kib = 100'000, .shared_kib = 80'000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 100'000 * kKiB);
  tree.sample_after(1000);
  EXPECT_EQ(tree.sampler().last().held_bytes, 120'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 0U);
  EXPECT_EQ(tree.finish().peak_at_most_bytes, 200'000 * kKiB);
}

// The more is owed, the longer copies wait. They bound the peak meanwhile, each page once.
TEST(Sampler, CopiesOnCreditWait) {
  SampledTree tree;
  const Process shared{.anon_kib = 100'000, .shared_kib = 100'000, .faults = 10};
  tree.put(11, shared);
  tree.put(12, shared);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  tree.set_reading_ns(100 * kNsPerMs);
  tree.sample_after();
  tree.sample_after();  // owes about 0.3 s, so that 3 s pass between two readings
  tree.set_reading_ns(kNsPerMs / 20);
  const auto put_copies = [&](uint64_t kib, uint64_t faults) {
    tree.put(11, {.anon_kib = 100'000, .shared_kib = 100'000 - kib, .faults = faults});
    tree.put(12, {.anon_kib = 100'000, .shared_kib = 100'000 - kib, .faults = 10});
  };
  put_copies(4'000, 1'010);
  tree.sample_after(0.1);
  tree.sample_after(0.1);
  EXPECT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 4'000 * kKiB);
  put_copies(4'000, 100'010);  // faults that copied nothing
  tree.sample_after(0.1);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 100'000 * kKiB);
  tree.sample_after(4);
  EXPECT_EQ(tree.sampler().last().held_bytes, 104'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().unread_copies_bytes, 0U);
  EXPECT_EQ(tree.finish().peak_at_most_bytes, 200'000 * kKiB);
}

// The kernel empties the environment before the process is a zombie.
TEST(Sampler, AProcessThatIsEndingKeepsItsRank) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 300, .variables = "RANK=3"});
  tree.sample_after();
  tree.put(11, {.anon_kib = 300, .variables = ""});
  tree.sample_after();
  EXPECT_EQ(tree.finish().processes.at(0).rank, 3);
}

TEST(Sampler, OthersAreThoseOfTheLastSample) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1000});
  tree.put(12, {.anon_kib = 4000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().held_by_others(12), 1000 * kKiB);
  tree.end(12);
  tree.sample_after();
  EXPECT_EQ(tree.sampler().last_held(12), 4000 * kKiB);
  EXPECT_EQ(tree.sampler().held_by_others(12), 1000 * kKiB) << "the last sample lacks it";
}

TEST(Sampler, AProcessThatEndedHoldsNothing) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1000});
  tree.put(12, {.parent = 11, .anon_kib = 4000});
  tree.sample_after(0.1);
  tree.end(12);
  tree.sample_after(0.1);
  const WatchRecord record = tree.finish();
  ASSERT_EQ(record.samples.size(), 2U);
  EXPECT_EQ(record.samples[0].held_bytes, 5000 * kKiB);
  EXPECT_EQ(record.samples[1].held_bytes, 1000 * kKiB);
  EXPECT_EQ(record.samples[1].shares.size(), 1U);
  EXPECT_DOUBLE_EQ(record.processes[1].end_s, 0.1);
}

TEST(Sampler, AProcessWithoutMemoryThatComesAndGoesLeavesNoTrace) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1000});
  tree.sample_after();
  tree.put(12, {.parent = 11});
  tree.end(12);
  tree.sample_after();
  EXPECT_EQ(tree.finish().processes.size(), 1U);
}

TEST(Sampler, AProcessKilledBeforeAnySampleHasItsReportedRank) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  SampledTree tree({.reports = &table});
  tree.sample_after();
  table.claim(11, 100 * kKiB)->rank.store(2);
  tree.sampler().add_unseen(11, "modicum-rank-2", 7 * kMiB);
  const WatchRecord record = tree.finish();
  ASSERT_EQ(record.processes.size(), 1U);
  EXPECT_EQ(record.processes[0].pid, 11);
  EXPECT_EQ(record.processes[0].rank, 2);
  EXPECT_EQ(record.processes[0].peak_bytes, 7 * kMiB);
}

// The tree is walked before the reports are read. In another case a pid is reused elsewhere.
TEST(Sampler, AProcessThatHasJustBegunKeepsItsReport) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  SampledTree tree({.reports = &table});
  tree.put(11, {.anon_kib = 1000});
  tree.sample_after();
  tree.put(12, {.parent = 11, .anon_kib = 500});
  tree.put(13, {.parent = 1, .anon_kib = 500});
  for (const int pid : {11, 12, 13, 14}) table.claim(pid, 0);
  tree.sampler().phase_of(11);  // reads the reports only
  EXPECT_EQ(table.pids[1].load(), 12);
  EXPECT_EQ(table.pids[2].load(), 0) << "it is not of this tree";
  EXPECT_EQ(table.pids[3].load(), 0) << "it has ended";
}

TEST(Sampler, WhatAProcessReportsDividesItsMemory) {
  const SharedPages pages = SharedPages::make(sizeof(SelfReports));
  SelfReports& table = SelfReports::make_in(pages.bytes());
  SampledTree tree({.reports = &table});
  SelfReport& report = *table.claim(11, 100 * kKiB);
  report.rank.store(2);
  report.held_bytes[at(Purpose::shards)].store(3000 * kKiB);
  tree.put(11, {.anon_kib = 4000});
  tree.put(12, {.anon_kib = 500});
  tree.sample_after();
  report.held_bytes[at(Purpose::moments)].store(1500 * kKiB);
  report.budget_bytes.store(9 * kMiB);
  tree.put(11, {.anon_kib = 6000});
  tree.sample_after();
  const TreeSampler::Growth growth = tree.sampler().growth(kNsPerSecond, 11);
  EXPECT_EQ(growth.pid, 11);
  EXPECT_EQ(watch_owner_name(growth.owner), "moments");
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.budget_bytes, 9 * kMiB);
  EXPECT_EQ(record.processes[0].rank, 2);
  ASSERT_EQ(record.samples.size(), 2U);
  const OwnedMemory& owned = record.samples[0].shares[0].owned;
  EXPECT_EQ(owned.bytes(at(Purpose::process)), 100 * kKiB);
  EXPECT_EQ(owned.bytes(at(Purpose::shards)), 3000 * kKiB);
  EXPECT_EQ(owned.bytes(at(WatchOwner::unexplained)), 900 * kKiB);
  const OwnedMemory& other = record.samples[0].shares[1].owned;
  EXPECT_EQ(other.bytes(at(WatchOwner::unattributed)), 500 * kKiB);
  for (const WatchSample& sample : record.samples) EXPECT_EQ(sum_of(sample), sample.held_bytes);
}

// The pages of the heap, which is the only mapping, from its begin on.
void put_heap(Machine& machine, int pid, uint64_t heap_kib) {
  machine.put(fmt::format("/proc/{}/maps", pid),
              "00000000-04000000 rw-p 00000000 00:00 0    [heap]\n");
  std::vector<uint64_t> entries(64 * kMiB / kPageBytes);
  std::fill_n(entries.begin(), heap_kib / 4, uint64_t{1} << 63);
  machine.put(fmt::format("/proc/{}/pagemap", pid),
              {reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof entries[0]});
}

// "20000 6000": KiB of the main heap and of large blocks in the last sample, of the process that
// holds most.
std::string kinds_in(const WatchSample& sample) {
  const OwnedMemory& owned = sample.shares.at(0).owned;
  return fmt::format("{} {}", owned.bytes(owner_of(MemoryKind::malloc_heap)) / kKiB,
                     owned.bytes(owner_of(MemoryKind::anonymous)) / kKiB);
}

TEST(Sampler, KindsAreReadAfterGrowthAndAfterTenSeconds) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 26'000});
  put_heap(tree.machine(), 11, 20'000);
  tree.sample_after();
  EXPECT_EQ(kinds_in(tree.sampler().last()), "20000 6000");
  tree.put(11, {.anon_kib = 31'000});
  put_heap(tree.machine(), 11, 25'000);
  tree.sample_after();
  EXPECT_EQ(kinds_in(tree.sampler().last()), "20000 11000") << "not within 0.1 s";
  tree.sample_after(0.1);
  EXPECT_EQ(kinds_in(tree.sampler().last()), "25000 6000");
  tree.put(11, {.anon_kib = 33'000});  // less than 4 MiB, of the kind that grew before
  put_heap(tree.machine(), 11, 20'000);
  for (int i = 0; i < 9; ++i) tree.sample_after(1);
  EXPECT_EQ(kinds_in(tree.sampler().last()), "27000 6000");
  tree.sample_after(1);
  EXPECT_EQ(kinds_in(tree.sampler().last()), "20000 13000");
}

TEST(Sampler, KindsAreNotReadWhenTheAllowedTimeIsUsedUp) {
  SampledTree tree({}, 100 * kNsPerMs);
  tree.put(11, {.anon_kib = 1'000});
  for (int i = 0; i < 4; ++i) tree.sample_after();
  tree.put(11, {.anon_kib = 26'000});
  put_heap(tree.machine(), 11, 20'000);
  for (int i = 0; i < 9; ++i) tree.sample_after();
  EXPECT_EQ(kinds_in(tree.sampler().last()), "0 0");
  tree.set_reading_ns(0);
  tree.sample_after(10'000);  // the allowance grows
  EXPECT_EQ(kinds_in(tree.sampler().last()), "20000 6000");
}

TEST(Sampler, KindsAreReadOnCreditNearTheLimit) {
  SampledTree tree({.limit_bytes = 50'000 * kKiB}, 60 * kNsPerMs);
  tree.put(11, {.anon_kib = 26'000});
  put_heap(tree.machine(), 11, 20'000);
  tree.sample_after();
  EXPECT_EQ(kinds_in(tree.sampler().last()), "0 0");
  tree.sample_after();
  EXPECT_EQ(kinds_in(tree.sampler().last()), "20000 6000");
}

// Of 90'000 KiB the two processes share 80'000 since a fork. The kernel's log counts them in full.
TEST(Sampler, AKillIsASampleOfWhatTheProcessHadGained) {
  SampledTree tree({.limit_bytes = 300'000 * kKiB});
  const Process shared{.anon_kib = 90'000, .shared_kib = 80'000, .faults = 10};
  tree.put(11, shared);
  tree.put(12, shared);
  for (int i = 0; i < 20; ++i) tree.sample_after();
  ASSERT_EQ(tree.sampler().last().held_bytes, 100'000 * kKiB);
  tree.end(12);
  tree.clock().advance_ns(kNsPerMs);
  EXPECT_EQ(tree.sampler().add_kill(12, 140'000 * kKiB), 100'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().held_bytes, 150'000 * kKiB);
  const TreeSampler::Growth growth = tree.sampler().growth(kNsPerSecond, 12);
  EXPECT_EQ(growth.pid, 12);
  EXPECT_EQ(growth.bytes, 50'000 * kKiB);
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.peak_bytes, 150'000 * kKiB);
  EXPECT_EQ(record.peak_at_most_bytes, 150'000 * kKiB);
  EXPECT_EQ(record.peak()->held_bytes, record.peak_bytes);
  EXPECT_EQ(record.processes[1].held_at_peak_bytes, 100'000 * kKiB);
  for (const WatchedProcess& process : record.processes) {
    EXPECT_DOUBLE_EQ(process.end_s, record.peak_at_s)
        << "the others may end before the next sample";
  }
  for (const WatchSample& sample : record.samples) EXPECT_EQ(sum_of(sample), sample.held_bytes);
}

// To free the memory of a large process takes seconds. A child in its parent's memory has none.
TEST(Sampler, AProcessWithoutMemoryIsEnding) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 10'000});
  tree.sample_after();
  EXPECT_FALSE(tree.sampler().is_ending());
  tree.put(11, {.name = "python3"});
  tree.sample_after();
  EXPECT_TRUE(tree.sampler().is_ending());
  tree.end(11);
  tree.sample_after();
  EXPECT_FALSE(tree.sampler().is_ending());
}

// The sample after the death has found the process gone.
TEST(Sampler, AKillAfterTheNextSampleHasTheMemoryOfTheOneBefore) {
  SampledTree tree({.limit_bytes = 120'000 * kKiB});
  tree.put(11, {.anon_kib = 10'000});
  tree.put(12, {.anon_kib = 80'000});
  tree.sample_after();
  tree.end(12);
  tree.sample_after();
  EXPECT_EQ(tree.sampler().add_kill(12, 100'000 * kKiB), 100'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().held_bytes, 110'000 * kKiB);
  EXPECT_EQ(tree.sampler().add_kill(12, 900'000 * kKiB), 110'000 * kKiB) << "the limit";
}

// The kernel frees the memory of a process that it kills before the process is gone.
TEST(Sampler, AKilledProcessWhoseMemoryIsFreedCountsOnce) {
  SampledTree tree({.limit_bytes = 120'000 * kKiB});
  tree.put(11, {.anon_kib = 10'000});
  tree.put(12, {.anon_kib = 80'000});
  tree.sample_after();
  tree.put(12, {.anon_kib = 0, .highest_kib = 80'000});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().add_kill(12, 81'000 * kKiB), 81'000 * kKiB);
}

// Nothing is known of a forked child for which there was no CPU time yet: its RSS counts, once.
TEST(Sampler, AKilledChildThatWasNeverReadCountsOnce) {
  SampledTree tree({}, kNsPerSecond);
  const Process shared{.anon_kib = 90'000, .shared_kib = 90'000};
  tree.put(11, shared);
  tree.sample_after();
  tree.put(12, shared);
  tree.sample_after();
  const uint64_t before = tree.sampler().last().held_bytes;
  tree.end(12);
  EXPECT_EQ(tree.sampler().add_kill(12, 95'000 * kKiB), 95'000 * kKiB);
  EXPECT_EQ(tree.sampler().last().held_bytes, before + 95'000 * kKiB);
}

// The limit bounds what may have been held between two samples.
TEST(Sampler, ThePeakAtMostIsWithinTheLimit) {
  SampledTree tree({.limit_bytes = 30'000 * kKiB});
  tree.put(11, {.anon_kib = 20'000, .highest_kib = 50'000});
  tree.sample_after();
  EXPECT_EQ(tree.finish().peak_at_most_bytes, 30'000 * kKiB);
}

TEST(Sampler, AProcessThatHasEndedIsTheOneThatGrewBefore) {
  SampledTree tree;
  tree.put(11, {.anon_kib = 1'200});
  tree.put(12, {.parent = 11, .anon_kib = 1'000});
  tree.sample_after();
  tree.put(12, {.parent = 11, .anon_kib = 90'000});
  tree.sample_after();
  tree.end(12);
  tree.put(11, {.anon_kib = 1'300});
  tree.sample_after();
  const TreeSampler::Growth growth = tree.sampler().growth(kNsPerSecond, 12);
  EXPECT_EQ(growth.pid, 12);
  EXPECT_EQ(growth.bytes, 89'000 * kKiB);
}

// More processes than a sample lists: the rest become one sum.
TEST(Sampler, ManySmallProcessesAreOneSum) {
  SampledTree tree;
  for (int pid = 100; pid < 200; ++pid) tree.put(pid, {.anon_kib = static_cast<uint64_t>(pid)});
  tree.sample_after();
  const WatchRecord record = tree.finish();
  ASSERT_EQ(record.samples.size(), 1U);
  const WatchSample& sample = record.samples[0];
  EXPECT_EQ(sample.shares.size(), TreeSampler::kMaxShares);
  EXPECT_GT(sample.others.total_bytes(), 0U);
  EXPECT_EQ(sum_of(sample), sample.held_bytes);
  EXPECT_EQ(sample.held_bytes, (100 + 199) * 100 / 2 * kKiB);
}

// The memory.stat of a v2 cgroup, as Linux 6.1 writes it.
constexpr const char* kStat =
    "anon 268435456\nfile 83886080\nkernel 3596288\nkernel_stack 753664\npagetables 1228800\n"
    "sec_pagetables 0\npercpu 4248\nsock 0\nvmalloc 86016\nshmem 20971520\nzswap 0\nzswapped 0\n"
    "file_mapped 32768\nfile_dirty 4096\nfile_writeback 0\nswapcached 0\nanon_thp 213909504\n"
    "file_thp 0\nshmem_thp 0\ninactive_anon 0\nactive_anon 268419072\ninactive_file 41943040\n"
    "active_file 20971520\nunevictable 0\nslab_reclaimable 581752\nslab_unreclaimable 756784\n"
    "slab 1338536\nworkingset_refault_anon 0\nworkingset_refault_file 0\npgscan 0\npgsteal 0\n"
    "pgfault 172506\npgmajfault 6\nthp_fault_alloc 27\nthp_collapse_alloc 86\n";

MemoryCgroup put_group(Machine& machine, uint64_t current, int kills) {
  const std::string directory = "/sys/fs/cgroup/job/modicum-watch-10";
  machine.put(directory + "/memory.current", fmt::format("{}\n", current));
  machine.put(directory + "/memory.max", "402653184\n");
  machine.put(directory + "/memory.high", "max\n");
  machine.put(directory + "/memory.stat", kStat);
  machine.put(
      directory + "/memory.events",
      fmt::format("low 0\nhigh 0\nmax 41\noom {}\noom_kill {}\noom_group_kill 0\n", kills, kills));
  return {.version = 2, .name = "/job/modicum-watch-10", .directory = machine.root() + directory};
}

TEST(Sampler, TheCommandsOwnGroupHasChargesAndPageCache) {
  Machine machine;
  const MemoryCgroup group = put_group(machine, 356515840, 0);
  SampledTree tree({.cage = group, .limit_bytes = 402653184});
  tree.put(11, {.anon_kib = 1000, .file_kib = 70});
  tree.sample_after();
  EXPECT_EQ(tree.sampler().last().charged_bytes, 356515840U);
  EXPECT_EQ(tree.sampler().last().page_cache_bytes, 41943040U + 20971520U);
  EXPECT_EQ(tree.sampler().pause_ns(), TreeSampler::kPauseNearLimitNs);
  const WatchRecord record = tree.finish();
  EXPECT_EQ(record.samples[0].page_cache_bytes, 41943040U + 20971520U);
}

// Two processes share 200 MiB since a fork, of which one has copied 100; 256 MiB are charged. A
// cgroup of the command alone counts copies at once; one with other processes bounds them.
TEST(Sampler, AGroupCountsCopiesThatHaveNotBeenRead) {
  constexpr uint64_t kShared = 200 * 1024;  // KiB
  for (const bool is_alone : {true, false}) {
    Machine machine;
    const MemoryCgroup group = put_group(machine, 356515840, 0);
    SampledTree tree(is_alone ? SamplerOptions{.cage = group} : SamplerOptions{.group = group});
    tree.put(11, {.anon_kib = kShared, .shared_kib = kShared, .faults = 10});
    tree.put(12, {.anon_kib = kShared, .shared_kib = kShared, .faults = 10});
    tree.sample_after();
    tree.set_reading_ns(kNsPerSecond);
    for (int i = 0; i < 8; ++i) tree.sample_after();  // no CPU time is left to read Pss
    tree.put(12, {.anon_kib = kShared, .faults = 100'010});
    tree.sample_after(0.1);
    const WatchSample& sample = tree.sampler().last();
    const uint64_t copies = 256 * kMiB - kShared * kKiB;
    EXPECT_EQ(sample.held_bytes, kShared * kKiB + (is_alone ? copies : 0));
    EXPECT_EQ(sum_of(sample), sample.held_bytes);
    EXPECT_EQ(sample.by_group_bytes, is_alone ? copies : 0U);
    EXPECT_EQ(sample.unread_copies_bytes, is_alone ? 0U : copies);
  }
}

TEST(Sampler, KillsInAGroupOfV2AreCounted) {
  Machine machine;
  Deaths deaths(put_group(machine, 402653184, 0));
  EXPECT_FALSE(deaths.has_new_kill());
  put_group(machine, 300000000, 1);
  EXPECT_TRUE(deaths.has_new_kill());
}

}  // namespace
}  // namespace modicum
