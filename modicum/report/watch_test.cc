#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "modicum/report/growth.h"
#include "modicum/report/owners.h"
#include "modicum/report/report.h"
#include "modicum/report/timeline.h"

namespace modicum {
namespace {

// Catches: a process has memory before it began; a promise counts outside of its phase; the peak is
// explained by a process that did not hold most; a comparison names an owner or phase that does not
// differ; a document of another program is accepted; an owner is named by its key instead of words;
// a worker process is labelled as its rank; a peak long ago, or memory that comes and goes, counts
// as growth; the advice is that of another kind.

size_t at(Purpose purpose) { return static_cast<size_t>(purpose); }
size_t at(WatchOwner owner) { return static_cast<size_t>(owner); }

OwnedMemory owned(std::initializer_list<std::pair<size_t, uint32_t>> kib) {
  OwnedMemory memory;
  for (const auto& [owner, amount] : kib) memory.kib[owner] = amount;
  return memory;
}

void add(WatchSample& sample, uint32_t process, const OwnedMemory& memory) {
  sample.shares.push_back({process, memory.total_bytes(), memory});
  sample.held_bytes += memory.total_bytes();
}

// The record of a launcher and a rank that loads from 0.1 to 0.3 s.
WatchRecord recorded() {
  WatchRecord record{.command = {"modicum", "load"}, .elapsed_s = 0.4};
  record.processes = {
      {.pid = 5, .name = "modicum", .begin_s = 0, .end_s = 0.4},
      {.pid = 6, .parent = 5, .name = "modicum-rank-0", .rank = 0, .begin_s = 0.1, .end_s = 0.3}};
  record.samples.resize(3);
  record.samples[0].at_s = 0.05;
  add(record.samples[0], 0, owned({{at(WatchOwner::unattributed), 10}}));
  record.samples[1] = {.at_s = 0.2, .page_cache_bytes = 7};
  add(record.samples[1], 1, owned({{at(Purpose::process), 2}, {at(Purpose::shards), 90}}));
  add(record.samples[1], 0, owned({{at(WatchOwner::unattributed), 12}}));
  record.samples[2].at_s = 0.35;
  add(record.samples[2], 0, owned({{at(WatchOwner::unattributed), 11}}));
  record.phases = {
      {.pid = 6, .rank = 0, .name = "load", .begin_s = 0.1, .end_s = 0.3, .promised_bytes = 100}};
  record.peak_bytes = 104 * kKiB;
  record.peak_at_s = 0.2;
  record.peak_at_most_bytes = 106 * kKiB;
  record.budget_bytes = 4096;
  record.group_limit_bytes = 8192;
  return record;
}

std::string timeline_of(const WatchRecord& record) {
  JsonWriter out;
  out.begin_object();
  timeline_members(out, record);
  return out.end_object().text();
}

TEST(WatchReport, ATimelineHasTheOwnersOfEachProcessWhileItLives) {
  EXPECT_EQ(timeline_of(recorded()),
            R"({"timeline":{"t_s":[0.05,0.2,0.35],"limit_bytes":8192,"budget_bytes":4096,)"
            R"("page_cache_bytes":[0,7,0],"tracks":[{"label":"rank 0","pid":6,"rank":0,"node":0,)"
            R"("owners":{"process":[null,2048,null],"shards":[null,92160,null]},)"
            R"("promise_bytes":[null,100,null]},{"label":"modicum","pid":5,"rank":null,"node":0,)"
            R"("owners":{"held":[10240,12288,11264]},"promise_bytes":null}],"phases":[{"pid":6,)"
            R"("rank":0,"name":"load","begin_s":0.1,"end_s":0.3}]},"peak":{"at_s":0.2,)"
            R"("bytes":106496,"at_most_bytes":108544,"cause":"during `load`, rank 0 (pid 6) held )"
            R"(92.00 KiB, of which parameters 90.00 KiB"}})");
}

TEST(WatchReport, TheLimitOfTheCommandReplacesThatOfItsCgroup) {
  WatchRecord record = recorded();
  record.limit_bytes = 5000;
  EXPECT_NE(timeline_of(record).find(R"("limit_bytes":5000)"), std::string::npos);
}

TEST(WatchReport, Only32ProcessesHaveTracksTheOthersShareOne) {
  WatchRecord record;
  record.samples.resize(1);
  for (uint32_t process = 0; process < 40; ++process) {
    record.processes.push_back({.pid = 100 + static_cast<int>(process), .name = "sleep"});
    add(record.samples[0], process, owned({{at(WatchOwner::unattributed), 1 + process}}));
  }
  record.samples[0].others = owned({{at(WatchOwner::unattributed), 1000}});
  const auto tracks = tracks_of(record);
  ASSERT_EQ(tracks.size(), 33U);
  EXPECT_EQ(tracks[0].pid(), 108);  // 100 to 107 hold least: 1 to 8 KiB
  EXPECT_EQ(tracks.back().label, "others");
  EXPECT_EQ(tracks.back().owned[0].total_bytes(), (1000 + 8 * 9 / 2) * kKiB);
}

// The worker has inherited RANK from its parent, which is a rank. torchrun's own rank comes from
// another variable, so the process that it starts is a rank itself.
TEST(WatchReport, AChildThatInheritsItsRankIsLabelledByNameAndRank) {
  WatchRecord record;
  record.processes = {
      {.pid = 5, .name = "torchrun", .rank = 0, .rank_variable = "SLURM_PROCID", .end_s = 9},
      {.pid = 6, .parent = 5, .name = "python3", .rank = 0, .rank_variable = "RANK", .end_s = 9},
      {.pid = 7, .parent = 6, .name = "worker", .rank = 0, .rank_variable = "RANK", .begin_s = 2},
      {.pid = 8, .parent = 6, .name = "engine", .rank = 1, .rank_variable = "RANK", .begin_s = 2},
      {.pid = 9, .parent = 5, .name = "rollout"}};
  std::vector<std::string> labels;
  for (const WatchedProcess& process : record.processes)
    labels.push_back(label_of(record, process));
  EXPECT_EQ(labels, (std::vector<std::string>{"rank 0", "rank 0", "worker of rank 0", "rank 1",
                                              "rollout"}));
}

TEST(WatchReport, TheCauseOfAPeakBetweenPhasesNamesThePhaseBefore) {
  WatchRecord record = recorded();
  record.phases.insert(record.phases.begin(),
                       {.pid = 6, .name = "open", .begin_s = 0.1, .end_s = 0.12});
  record.phases.back().end_s = 0.15;
  EXPECT_TRUE(peak_cause(record).starts_with("after `load`, rank 0 (pid 6) held"));
}

TEST(WatchReport, TheLimitIsTheUsersFigureIfItsSizeIsRounded) {
  WatchRecord record = recorded();
  record.limit_bytes = 1200 * kMiB;
  record.limit_text = "1200MiB";
  record.killed = {.pid = 6, .limit_bytes = 1200 * kMiB, .limit_source = "--limit"};
  EXPECT_NE(watch_text(record).find(", limit 1200MiB (1.17 GiB)"), std::string::npos);
  EXPECT_NE(killed_text(record).find("--limit allows 1200MiB (1.17 GiB)."), std::string::npos);
  record.limit_bytes = kGiB;
  record.limit_text = "1024M";
  EXPECT_NE(watch_text(record).find(", limit 1.00 GiB"), std::string::npos);
  record.left_running = 1;
  EXPECT_NE(watch_text(record).find("still running: 1 process of"), std::string::npos);
}

TEST(WatchReport, APeakThatMayHaveBeenMissedSaysSo) {
  WatchRecord record = recorded();
  record.peak_at_most_bytes = record.peak_bytes + 4 * kMiB;
  EXPECT_EQ(peak_cause(record).find("between two samples"), std::string::npos);
  record.peak_at_most_bytes += 1;
  EXPECT_TRUE(peak_cause(record).ends_with(
      "; between two samples the peak may have been higher, at most 4.10 MiB (VmHWM)"));
  EXPECT_NE(watch_text(record).find("at most 4.10 MiB"), std::string::npos);
  record.is_at_most_by_copies = true;
  EXPECT_TRUE(peak_cause(record).ends_with(
      "; with copies of pages shared since a fork the peak may "
      "have been higher, at most 4.10 MiB (page faults; exact with --limit)"));
  record.killed = {.pid = 6, .name = "modicum-rank-0"};
  EXPECT_EQ(watch_text(record).find("at most 4.10 MiB"), std::string::npos)
      << "the kill has its own figure";
}

// Ten seconds of a process whose heap grows by `heap_mib` per second, whose blocks are 100 MiB, and
// which is at its peak at `peak_s`; another process is at rest.
WatchRecord growing(double heap_mib, double peak_s = 10) {
  WatchRecord record{.command = {"python", "train.py"}, .elapsed_s = 10};
  record.processes = {{.pid = 7, .name = "python", .end_s = 10, .held_at_peak_bytes = 140 * kMiB},
                      {.pid = 8, .name = "idle", .end_s = 10}};
  for (int i = 0; i <= 50; ++i) {
    const double at_s = 0.2 * i;
    const auto heap_kib = static_cast<uint32_t>(at_s > peak_s ? 0 : heap_mib * at_s * 1024);
    WatchSample sample{.at_s = at_s};
    add(sample, 0,
        owned({{owner_of(MemoryKind::malloc_heap), heap_kib},
               {owner_of(MemoryKind::anonymous), 100 * 1024}}));
    add(sample, 1, owned({{at(WatchOwner::unattributed), 900 * 1024}}));
    record.samples.push_back(sample);
  }
  record.peak_bytes = record.peak()->held_bytes;
  return record;
}

TEST(WatchReport, NamesWhatGrowsAndWhatToRunNext) {
  const WatchRecord record = growing(8);
  EXPECT_EQ(
      growth_text(record),
      "python (pid 7) grew by 8.00 MiB per second for the last 5.0 s before its peak, of which "
      "malloc's main heap 8.00 MiB");
  const std::string text = watch_text(record);
  EXPECT_NE(text.find(growth_text(record) + "\nnext: small blocks, and tensors"), std::string::npos)
      << text;
  EXPECT_NE(text.find("`modicum doctor --pid PID` with the PID of python (here 7) tells"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("140.00 MiB  python (pid 7): anonymous mappings 100.00 MiB, malloc's main "
                      "heap 80.00 MiB\n"),
            std::string::npos)
      << text;
  const std::string json = watch_json(record);
  EXPECT_NE(json.find(R"("growth":{"pid":7,"name":"python","rank":null,"owner":"malloc_heap",)"
                      R"("bytes_per_s":8388608,"owner_bytes_per_s":8388608,"seconds":5)"),
            std::string::npos)
      << json;
}

TEST(WatchReport, WhatIsSteadyOrRoseOnceDoesNotGrow) {
  EXPECT_EQ(growth_text(growing(0)), "");
  EXPECT_EQ(growth_text(growing(2)), "") << "10 MiB within 5 s";
  EXPECT_EQ(growth_text(growing(80, 4)), "") << "the peak was long ago";
  WatchRecord record = growing(8);
  for (size_t s = 0; s < record.samples.size(); s += 2) {  // garbage that is collected
    record.samples[s].shares[0].owned.kib[owner_of(MemoryKind::anonymous)] = 400 * 1024;
  }
  EXPECT_EQ(growth_text(record), "");
  EXPECT_EQ(watch_text(record).find("next:"), std::string::npos);
  EXPECT_NE(watch_json(record).find(R"("growth":null,"next":null)"), std::string::npos);
}

TEST(WatchReport, AfterAKillWithoutSteadyGrowthNextIsOfTheOwnerThatGrewLast) {
  WatchRecord record = growing(0);
  record.killed = {.pid = 7, .name = "python", .grew_owner = "shared_memory", .grew_bytes = 5};
  EXPECT_TRUE(next_text(record).starts_with("batches of data-loader workers"));
  record.killed->grew_pid = 8;  // the kernel killed another process
  record.killed->grew_name = "loader";
  EXPECT_NE(next_text(record).find("the PID of loader (here 8)"), std::string::npos);
  record.killed->grew_owner = "shards";
  EXPECT_EQ(next_text(record), "");
  for (size_t owner = 0; owner < kWatchOwners; ++owner) {
    const bool is_advised =
        owner >= owner_of(MemoryKind{}) || owner == at(WatchOwner::copies_since_fork);
    EXPECT_EQ(next_step(owner, 7).empty(), !is_advised) << watch_owner_name(owner);
  }
  // A limit of the heaps of threads does nothing for the main heap.
  EXPECT_TRUE(next_step(owner_of(MemoryKind::malloc_heap), 7).ends_with("_THRESHOLD_=65536"));
  EXPECT_TRUE(next_step(owner_of(MemoryKind::malloc_arenas), 7).ends_with("_ARENA_MAX=2"));
}

TEST(WatchReport, HasHugePagesAndLongWaits) {
  WatchRecord record = recorded();
  EXPECT_NE(watch_json(record).find(R"("huge_page_bytes":null)"), std::string::npos);
  EXPECT_NE(watch_json(record).find(R"("pressure":null)"), std::string::npos);
  record.processes[1].held_at_peak_bytes = 92 * kKiB;
  record.processes[1].huge_page_bytes = 2 * kMiB;
  record.pressure = MemoryPressure{"cgroup v2 /a", 99'000, 50'000};
  EXPECT_NE(watch_text(record).find("(pid 6, rank 0), up to 2.00 MiB in huge pages\n"),
            std::string::npos);
  EXPECT_EQ(watch_text(record).find("waited"), std::string::npos) << "short waits are usual";
  record.pressure->some_us = 1'250'000;
  EXPECT_NE(watch_json(record).find(
                R"("pressure":{"source":"cgroup v2 /a","some_s":1.25,"full_s":0.05})"),
            std::string::npos);
  EXPECT_NE(watch_text(record).find(
                "waited for memory: some process 1.2 s, all processes 0.1 s (cgroup v2 /a)\n"),
            std::string::npos);
}

TEST(WatchReport, WithoutPhasesAndOwnersTheCauseOfAPeakIsAProcess) {
  WatchRecord record = recorded();
  record.phases.clear();
  record.samples.erase(record.samples.begin() + 1);
  EXPECT_EQ(peak_cause(record), "modicum (pid 5) held 11.00 KiB");
  record.samples.clear();
  EXPECT_EQ(peak_cause(record), "no process held memory");
}

TEST(WatchReport, AKillHasItsPhaseItsOwnerAndWhatWouldHaveFitted) {
  WatchRecord record = recorded();
  record.killed = {.pid = 6,
                   .name = "modicum-rank-0",
                   .rank = 0,
                   .at_s = 0.3,
                   .limit_bytes = kMiB,
                   .limit_source = "--limit",
                   .held_bytes = 92 * kKiB,
                   .tree_held_bytes = 104 * kKiB,
                   .phase = "load",
                   .grew_pid = 6,
                   .grew_name = "modicum-rank-0",
                   .grew_owner = "shards",
                   .grew_bytes = 80 * kKiB,
                   .grew_s = 0.1,
                   .promised_bytes = 2 * kMiB};
  EXPECT_EQ(killed_text(record),
            "the kernel killed modicum-rank-0 (pid 6, rank 0) after 0.3 s, during `load`, for lack "
            "of memory: --limit allows 1.00 MiB. Just before, it held 92.00 KiB, all processes of "
            "the command 104.00 KiB, and 0 B of page cache were in use. modicum-rank-0 (pid 6) "
            "grew last, by 80.00 KiB within 0.10 s, mostly parameters; all processes "
            "together predict 2.00 MiB: a limit of that would have fitted.");
  const std::string json = watch_json(record);
  EXPECT_NE(json.find(R"("phase":"load","grew":{"pid":6,"name":"modicum-rank-0","owner":"shards")"),
            std::string::npos);
}

TEST(WatchReport, ATraceHasCountersByOwnerAndPhases) {
  const std::string trace = watch_trace(recorded());
  EXPECT_TRUE(trace.starts_with(R"({"displayTimeUnit":"ms","traceEvents":[)"));
  const auto has = [&](const std::string& event) {
    EXPECT_NE(trace.find(event), std::string::npos) << event << "\n" << trace;
  };
  has(R"({"ph":"M","name":"process_name","pid":6,"tid":6,"args":{"name":"rank 0"}})");
  has(R"({"ph":"C","name":"memory","pid":6,"tid":6,"ts":200000,"args":{"process":2048,)"
      R"("shards":92160}})");
  has(R"({"ph":"C","name":"memory","pid":6,"tid":6,"ts":350000,"args":{"process":0,"shards":0}})");
  has(R"({"ph":"C","name":"page cache","pid":0,"tid":0,"ts":200000,"args":{"bytes":7}})");
  has(R"({"ph":"X","name":"load","pid":6,"tid":6,"cat":"phase","ts":100000,"dur":200000})");
  has(R"({"ph":"i","name":"peak","pid":0,"tid":0,"s":"g","ts":200000)");
  EXPECT_EQ(trace.find(R"("pid":6,"tid":6,"ts":50000)"), std::string::npos) << "before it began";
}

TEST(WatchReport, EachOwnerHasWords) {
  for (size_t owner = 0; owner < kWatchOwners; ++owner) {
    const std::string_view key = watch_owner_name(owner);
    EXPECT_EQ(std::ranges::count(owners_in_words(), key, &OwnerWords::owner), 1) << key;
  }
  EXPECT_EQ(owner_words("held"), "not attributed");
  EXPECT_EQ(owner_words("of_another_version"), "of another version");
}

// ---- comparisons

// The document of a run with three samples. One process holds `shards` and `staging` bytes at the
// second sample; the other process holds `later` bytes at the third.
std::string document(uint64_t shards, uint64_t staging, uint64_t later) {
  return "{\"timeline\":{\"tracks\":[{\"owners\":{\"shards\":[null," + std::to_string(shards) +
         ",0],\"staging\":[null," + std::to_string(staging) + ",0]}},{\"owners\":{\"held\":[1,1," +
         std::to_string(later) +
         "]}}],\"t_s\":[0,1,2],\"phases\":[{\"name\":\"load\",\"begin_s\":0.5,\"end_s\":1.5},"
         "{\"name\":\"step\",\"begin_s\":1.6,\"end_s\":2}]},\"peak\":{\"bytes\":" +
         std::to_string(shards + staging + 1) + ",\"cause\":\"why\"}}";
}

TEST(Comparison, NamesTheOwnerAndThePhaseThatDifferMost) {
  const RunComparison runs{parse_run(document(1000, 10, 50), "a.json"),
                           parse_run(document(3000, 20, 55), "b.json")};
  EXPECT_EQ(runs.a.owners,
            (std::map<std::string, uint64_t>{{"held", 1}, {"shards", 1000}, {"staging", 10}}));
  EXPECT_EQ(runs.a.phases, (std::map<std::string, uint64_t>{{"load", 1011}, {"step", 50}}));
  EXPECT_EQ(runs.owner(), "shards");
  EXPECT_EQ(runs.phase(), "load");
  EXPECT_EQ(runs.sentence(),
            "the peak of b.json is 1.96 KiB higher than that of a.json (2.95 KiB against 1011 B); "
            "at the peaks, the owner \"parameters\" differs most (2.93 KiB against 1000 B); of the "
            "phases that both have, `load` differs most (2.95 KiB against 1011 B)");
  const std::string json = comparison_json(runs);
  EXPECT_NE(json.find(R"("difference_bytes":2010,"owner":"shards","phase":"load")"),
            std::string::npos);
  EXPECT_NE(json.find(R"({"name":"shards","a_bytes":1000,"b_bytes":3000})"), std::string::npos);
  EXPECT_NE(comparison_text(runs).find("+1.95 KiB"), std::string::npos);
}

// A phase of only one run can't explain the difference; an owner of only one run can.
TEST(Comparison, APhaseMustBeInBothRunsAnOwnerNeedNot) {
  const RunComparison runs{{.owners = {{"shards", 10}}, .phases = {{"load", 10}, {"step", 11}}},
                           {.owners = {{"held", 99}}, .phases = {{"load", 12}, {"save", 90}}}};
  EXPECT_EQ(runs.phase(), "load");
  EXPECT_EQ(runs.owner(), "held");
  EXPECT_NE(comparison_text(runs).find("\n  not attributed "), std::string::npos);
}

TEST(Comparison, OwnersOfARunWithoutReportsAreNotComparedWithPurposes) {
  const std::string by_kind =
      R"({"timeline":{"tracks":[{"owners":{"anonymous":[5000]}}],"t_s":[0],"phases":[]},)"
      R"("peak":{"bytes":5000,"cause":"why"}})";
  const RunComparison runs{parse_run(by_kind, "plain"),
                           parse_run(document(1000, 10, 50), "modicum")};
  EXPECT_EQ(runs.owner(), "");
  EXPECT_EQ(runs.sentence(),
            "the peak of plain is 3.90 KiB higher than that of modicum (4.88 KiB against 1011 B); "
            "owners are not compared: the memory of plain is divided by kind only, as no process "
            "of it reported to Modicum");
  EXPECT_NE(comparison_json(runs).find(R"("owner":null,"phase":null,"is_certain":true,)"
                                       R"("has_comparable_owners":false)"),
            std::string::npos);
  EXPECT_NE(comparison_text(runs).find("\n  parameters                             -        1000 B "
                                       "             -\n"),
            std::string::npos)
      << comparison_text(runs);
  const RunComparison alike{parse_run(by_kind, "a"), parse_run(by_kind, "b")};
  EXPECT_TRUE(alike.has_comparable_owners());
}

// Must fail if an owner or a phase is named for peaks that may be the other way round.
TEST(Comparison, NamesNothingIfEitherPeakMayBeHigher) {
  const auto run = [](const char* name, uint64_t peak_mib, uint64_t at_most_mib) {
    return parse_run(fmt::format(R"({{"timeline":{{"tracks":[{{"owners":{{"held":[{0}]}}}}],)"
                                 R"("t_s":[0],"phases":[{{"name":"x","begin_s":0,"end_s":1}}]}},)"
                                 R"("peak":{{"bytes":{0},"at_most_bytes":{1}}}}})",
                                 peak_mib * kMiB, at_most_mib * kMiB),
                     name);
  };
  const RunComparison runs{run("a", 1130, 2410), run("b", 1770, 2160)};
  EXPECT_FALSE(runs.is_certain());
  EXPECT_EQ(runs.owner() + runs.phase(), "");
  EXPECT_EQ(runs.sentence(),
            "it is not certain which peak is higher: that of a is 1.10 GiB to 2.35 GiB, that of b "
            "is 1.73 GiB to 2.11 GiB");
  EXPECT_NE(comparison_text(runs).find("\npeak, at most "), std::string::npos);
  EXPECT_NE(comparison_json(runs).find(R"("is_certain":false)"), std::string::npos);
  EXPECT_TRUE((RunComparison{run("a", 1130, 1770), run("b", 1770, 2160)}).is_certain());
  EXPECT_TRUE((RunComparison{run("a", 1130, 1131), run("b", 1130, 1133)}).is_certain())
      << "bounds that do not matter";
  const RunComparison equal{run("a", 1130, 2410), run("b", 1130, 1130)};
  EXPECT_FALSE(equal.is_certain());
  EXPECT_TRUE(equal.sentence().starts_with("it is not certain which peak is higher"));
}

TEST(Comparison, ACommandThatFailedMayHaveEndedBeforeItsPeak) {
  const WatchedRun whole = parse_run(document(1000, 10, 50), "a");
  std::string text = document(900, 10, 50);
  text.insert(1, R"("exit_code":139,)");
  const RunComparison runs{whole, parse_run(text, "b")};
  EXPECT_TRUE(runs.sentence().ends_with("; b ended with exit code 139, perhaps before its peak"));
  EXPECT_NE(comparison_text(runs).find("B: b (ended with exit code 139)"), std::string::npos);
  EXPECT_NE(comparison_json(runs).find(R"("exit_code":139)"), std::string::npos);
}

TEST(Comparison, OfARunWithItselfNamesNoOwnerAndNoPhase) {
  const WatchedRun run = parse_run(document(1000, 10, 50), "a.json");
  const RunComparison runs{run, run};
  EXPECT_EQ(runs.owner(), "");
  EXPECT_EQ(runs.phase(), "");
  EXPECT_EQ(runs.sentence(), "a.json and a.json have the same peak, 1011 B");
  EXPECT_NE(comparison_json(runs).find(R"("owner":null,"phase":null)"), std::string::npos);
}

TEST(Comparison, OtherDocumentsAreRefused) {
  const auto category_of = [](const std::string& text) -> std::optional<Category> {
    try {
      parse_run(text, "x.json");
    } catch (const Error& error) {
      EXPECT_EQ(error.facts().file, "x.json");
      return error.category();
    }
    return std::nullopt;
  };
  EXPECT_EQ(category_of(""), Category::format_json);
  EXPECT_EQ(category_of("{,"), Category::format_json);
  EXPECT_EQ(category_of("{}"), Category::format_schema);
  EXPECT_EQ(category_of("[1]"), Category::format_schema);
  EXPECT_EQ(category_of(R"({"peak":{"bytes":"much"}})"), Category::format_schema);
  EXPECT_EQ(category_of("{\"peak\":{\"bytes\":1},\"x\":\"\xff\"}"), Category::format_utf8);
  EXPECT_EQ(category_of(R"({"peak":{"bytes":1},"peak":{"bytes":1}})"), Category::format_dup);
  EXPECT_EQ(category_of(R"({"timeline":{"t_s":[0],"tracks":[{"owners":{"held":[1,2]}}]},)"
                        R"("peak":{"bytes":1}})"),
            Category::format_schema);
  EXPECT_EQ(category_of(R"({"peak":{"bytes":1}})"), std::nullopt);
}

}  // namespace
}  // namespace modicum
