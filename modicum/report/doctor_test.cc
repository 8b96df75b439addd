// Tests of the findings of `doctor` for given facts, and of their text and JSON.
#include "modicum/report/doctor.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace modicum {
namespace {

// The facts of a machine without dangers or warnings.
DoctorFacts healthy() {
  DoctorFacts facts;
  facts.limits = {{"cgroup v2 /job", 100 * kGiB, 60 * kGiB, 10 * kGiB, 0},
                  {"MemAvailable", 500 * kGiB, 400 * kGiB, 50 * kGiB, 0}};
  facts.settings = {.locked_memory = ResourceLimit{UINT64_MAX, UINT64_MAX},
                    .open_files = ResourceLimit{1 << 20, 1 << 20},
                    .address_space = ResourceLimit{UINT64_MAX, UINT64_MAX},
                    .huge_pages = "madvise",
                    .shmem_huge_pages = "advise",
                    .swap_bytes = 0,
                    .overcommit = 0,
                    .shm_bytes = 200 * kGiB,
                    .shm_free_bytes = 200 * kGiB,
                    .max_map_count = 1 << 20};
  return facts;
}

DoctorFacts training() {
  DoctorFacts facts = healthy();
  facts.program = Program{.pid = 4242, .name = "python"};
  return facts;
}

const Finding& find(const std::vector<Finding>& findings, std::string_view id) {
  const auto found = std::find_if(findings.begin(), findings.end(),
                                  [&](const Finding& finding) { return finding.id == id; });
  if (found == findings.end()) fail(Category::internal, "no finding " + std::string(id));
  return *found;
}

// A finding as "SEVERITY VALUE" or "SEVERITY VALUE of LIMIT"; values from 2^20 on in MiB.
std::string text_of(const DoctorFacts& facts, std::string_view id) {
  const std::vector<Finding> findings = findings_of(facts);
  const Finding& finding = find(findings, id);
  const auto number = [](uint64_t n) {
    return n < kMiB ? std::to_string(n) : std::to_string(n / kMiB) + "M";
  };
  const uint64_t* const bytes = std::get_if<uint64_t>(&finding.value);
  std::string text = std::string(severity_name(finding.severity)) + " " +
                     (bytes != nullptr ? number(*bytes) : std::get<std::string>(finding.value));
  if (finding.limit_bytes) text += " of " + number(*finding.limit_bytes);
  if (finding.limit_count) text += " of " + std::to_string(*finding.limit_count);
  return text;
}

bool has(const DoctorFacts& facts, std::string_view id) {
  const std::vector<Finding> findings = findings_of(facts);
  return std::any_of(findings.begin(), findings.end(),
                     [&](const Finding& finding) { return finding.id == id; });
}

TEST(Findings, OfAHealthyMachineAreAllInfo) {
  for (const DoctorFacts& facts : {healthy(), training()}) {
    for (const Finding& finding : findings_of(facts)) {
      EXPECT_EQ(finding.severity, Severity::info) << finding.id << ": " << finding.summary;
      EXPECT_FALSE(finding.summary.empty() || finding.advice.empty()) << finding.id;
      EXPECT_EQ((finding.summary + finding.advice).find('\n'), std::string::npos) << finding.id;
    }
  }
}

// Must fail if only one level of the cgroup chain is reported, or if a level's severity depends on
// the size of its limit instead of the bytes left.
TEST(Findings, EachLevelOfMemoryIsJudgedByWhatItHasLeft) {
  DoctorFacts facts = healthy();
  facts.limits = {{"cgroup v1 /a/b", 400 * kMiB, 10 * kMiB, 0, 0},
                  {"cgroup v1 /a", 500 * kMiB, 100 * kMiB, 0, 0},
                  {"MemAvailable", kGiB, 512 * kMiB, 0, 0}};
  const std::vector<Finding> findings = findings_of(facts);
  EXPECT_EQ(text_of(facts, "cgroup_memory"), "danger 390M of 400M");
  EXPECT_EQ(std::count_if(findings.begin(), findings.end(),
                          [](const Finding& finding) { return finding.id == "cgroup_memory"; }),
            2);
  EXPECT_EQ(findings[0].severity, Severity::danger);
  EXPECT_EQ(findings[1].severity, Severity::warning);
  EXPECT_EQ(findings[1].summary, "100.00 MiB of 500.00 MiB left (cgroup v1 /a)");
  EXPECT_EQ(text_of(facts, "node_memory"), "info 512M of 1024M");
}

TEST(Findings, WithoutACgroupsLimitTheNodeIsTheLimit) {
  DoctorFacts facts = healthy();
  facts.limits = {{"MemAvailable", kGiB, 512 * kMiB, 100 * kMiB, 200 * kMiB}};
  EXPECT_EQ(text_of(facts, "cgroup_memory"), "info none");
  EXPECT_EQ(text_of(facts, "page_cache"), "info 100M of 1024M");
  EXPECT_EQ(text_of(facts, "shmem"), "warning 200M of 1024M");
  facts.limits.clear();
  EXPECT_FALSE(has(facts, "page_cache"));
}

// Must fail if page cache counts twice as used memory, or if a full group with little page cache
// gets a warning.
TEST(Findings, PageCacheIsAWarningOnlyInAFullGroup) {
  DoctorFacts facts = healthy();
  const auto with = [&](uint64_t available, uint64_t cache) {
    facts.limits[0] = {"cgroup v2 /job", 1000 * kMiB, available * kMiB, cache * kMiB, 0};
    return text_of(facts, "page_cache");
  };
  EXPECT_EQ(with(950, 900), "warning 900M of 1000M");
  EXPECT_EQ(with(950, 600), "info 600M of 1000M");
  EXPECT_EQ(with(300, 300), "info 300M of 1000M");
}

TEST(Findings, OomKillsAndUsedSwapAreWarnings) {
  DoctorFacts facts = healthy();
  EXPECT_FALSE(has(facts, "oom_kills"));
  EXPECT_EQ(text_of(facts, "swap"), "info 0 of 0");
  facts.oom_kills = 3;
  EXPECT_EQ(text_of(facts, "oom_kills"), "warning 3");
  facts.settings.swap_bytes = 100 * kMiB;
  facts.settings.swap_free_bytes = 98 * kMiB;
  EXPECT_EQ(text_of(facts, "swap"), "info 2M of 100M");
  facts.settings.swap_free_bytes = 50 * kMiB;
  EXPECT_EQ(text_of(facts, "swap"), "warning 50M of 100M");
}

// Must fail if the budget is compared with the whole limit instead of the bytes left.
TEST(Findings, ABudgetIsComparedWithWhatIsLeft) {
  DoctorFacts facts = healthy();
  EXPECT_FALSE(has(facts, "budget"));
  facts.budget_bytes = 60 * kGiB;
  EXPECT_EQ(text_of(facts, "budget"), "info 61440M of 61440M");
  facts.budget_bytes = 60 * kGiB + 1;
  EXPECT_EQ(text_of(facts, "budget"), "danger 61440M of 61440M");
}

TEST(Findings, StrictOvercommitLimitsUntouchedMemory) {
  DoctorFacts facts = healthy();
  EXPECT_EQ(text_of(facts, "overcommit"), "info 0");
  facts.settings.overcommit = 1;
  EXPECT_EQ(text_of(facts, "overcommit"), "info 1");
  facts.settings.overcommit = 2;
  facts.settings.commit_limit_bytes = 100 * kGiB;
  facts.settings.committed_bytes = 50 * kGiB;
  EXPECT_EQ(text_of(facts, "overcommit"), "warning 2 of 102400M");
  facts.settings.committed_bytes = 80 * kGiB;
  EXPECT_EQ(text_of(facts, "overcommit"), "danger 2 of 102400M");
}

// Must fail if there is a warning although the process has CAP_IPC_LOCK, which lifts the limit, or
// although the limit is above the memory limit.
TEST(Findings, ALimitOnLockedMemoryIsAWarningOnlyIfItApplies) {
  DoctorFacts facts = healthy();
  EXPECT_EQ(text_of(facts, "memlock"), "info unlimited");
  facts.settings.locked_memory = ResourceLimit{8 * kMiB, 8 * kMiB};
  EXPECT_EQ(text_of(facts, "memlock"), "warning 8M of 8M");
  facts.settings.may_lock_all = true;
  EXPECT_EQ(text_of(facts, "memlock"), "info 8M of 8M");
  facts.settings.may_lock_all = false;
  facts.settings.locked_memory = ResourceLimit{200 * kGiB, 200 * kGiB};
  EXPECT_EQ(text_of(facts, "memlock"), "info 204800M of 204800M");
}

TEST(Findings, HugePagesThatAreNeverUsedAreAWarning) {
  DoctorFacts facts = healthy();
  EXPECT_EQ(text_of(facts, "transparent_huge_pages"), "info madvise");
  facts.settings.huge_pages = "never";
  facts.settings.shmem_huge_pages = "never";
  EXPECT_EQ(text_of(facts, "transparent_huge_pages"), "warning never");
  EXPECT_EQ(text_of(facts, "shmem_huge_pages"), "info never");
  facts.settings.huge_pages = "";
  EXPECT_FALSE(has(facts, "transparent_huge_pages"));
}

TEST(Findings, DockersDefaultOf64MibInDevShmIsADanger) {
  DoctorFacts facts = healthy();
  const auto with = [&](uint64_t size, uint64_t free) {
    facts.settings.shm_bytes = size * kMiB;
    facts.settings.shm_free_bytes = free * kMiB;
    return text_of(facts, "shm_size");
  };
  EXPECT_EQ(with(64, 64), "danger 0 of 64M");
  EXPECT_EQ(with(8192, 10), "danger 8182M of 8192M");
  EXPECT_EQ(with(8192, 512), "warning 7680M of 8192M");
  EXPECT_EQ(with(8192, 4096), "info 4096M of 8192M");
  facts.settings.shm_bytes.reset();
  EXPECT_EQ(text_of(facts, "shm_size"), "warning none");
}

TEST(Findings, CountsOfAProgramAreComparedWithTheirLimits) {
  DoctorFacts facts = healthy();
  facts.settings.max_map_count = 60000;
  facts.settings.open_files = ResourceLimit{1024, 524288};
  EXPECT_EQ(text_of(facts, "max_map_count"), "warning 60000 of 60000");
  EXPECT_EQ(text_of(facts, "nofile"), "warning 1024 of 1024");
  const std::vector<Finding> findings = findings_of(facts);
  EXPECT_NE(find(findings, "nofile").advice.find("ulimit -n 524288"), std::string::npos);
  facts.program = Program{.pid = 1, .mappings = 100, .open_files = 600};
  EXPECT_EQ(text_of(facts, "max_map_count"), "info 100 of 60000");
  EXPECT_EQ(text_of(facts, "nofile"), "warning 600 of 1024");
  facts.program->open_files = 1000;
  EXPECT_EQ(text_of(facts, "nofile"), "danger 1000 of 1024");
}

TEST(Findings, ALimitOnAddressesIsAWarning) {
  DoctorFacts facts = healthy();
  EXPECT_FALSE(has(facts, "address_space"));
  facts.settings.address_space = ResourceLimit{kGiB, kGiB};
  EXPECT_EQ(text_of(facts, "address_space"), "warning 1024M of 1024M");
}

// Must fail if the exposure is compared with the limit instead of the bytes left.
TEST(Findings, ForkExposureIsADangerWhereItsCopiesDoNotFit) {
  DoctorFacts facts = training();
  const auto with = [&](uint64_t exposed) {
    facts.program->exposed_bytes = exposed;
    return text_of(facts, "fork_exposure");
  };
  EXPECT_EQ(with(0), "info 0 of 61440M");
  EXPECT_EQ(with(100 * kMiB), "info 100M of 61440M");
  EXPECT_EQ(with(2 * kGiB), "warning 2048M of 61440M");
  EXPECT_EQ(with(61 * kGiB), "danger 62464M of 61440M");
  facts.limits[0].available_bytes = 900 * kMiB;
  EXPECT_EQ(with(100 * kMiB), "warning 100M of 900M");
  EXPECT_FALSE(has(facts, "fork_copies"));
  facts.program->copied_bytes = kGiB;
  EXPECT_EQ(text_of(facts, "fork_copies"), "warning 1024M");
}

// Must fail if there is advice only with a warning, or advice only for data loaders.
TEST(Findings, From64MibOnExposuresAndHeapsHaveAdviceWithoutAWarning) {
  DoctorFacts facts = training();
  const auto advice = [&](std::string_view id) { return find(findings_of(facts), id).advice; };
  const auto summary = [&](std::string_view id) { return find(findings_of(facts), id).summary; };
  const auto expect_none = [&] {
    for (const char* id : {"fork_exposure", "malloc_arenas", "malloc_heap"}) {
      EXPECT_EQ(advice(id), "nothing to do") << id;
    }
  };
  const auto put_heaps = [&](uint64_t bytes) {
    facts.program->arena_heaps = 1;
    facts.program->kinds[MemoryKind::malloc_heap] = bytes;
    facts.program->kinds[MemoryKind::malloc_arenas] = bytes;
  };
  expect_none();
  EXPECT_EQ(summary("fork_exposure"), "nothing is shared with forked children");
  EXPECT_EQ(summary("malloc_arenas"), "nothing in heaps of threads; MALLOC_ARENA_MAX not set");
  EXPECT_EQ(summary("malloc_heap"), "nothing in the main heap");
  facts.program->exposed_bytes = 64 * kMiB - 1;
  put_heaps(64 * kMiB - 1);
  expect_none();
  facts.program->exposed_bytes = 64 * kMiB;
  put_heaps(64 * kMiB);
  for (const char* word : {"modicum.torch.protect", "MADV_DONTFORK", "get_context(\"forkserver\")",
                           "\"spawn\"", "DataLoader("}) {
    EXPECT_NE(advice("fork_exposure").find(word), std::string::npos) << word;
  }
  EXPECT_NE(advice("malloc_arenas").find("MALLOC_ARENA_MAX=2"), std::string::npos);
  EXPECT_NE(advice("malloc_heap").find("malloc_trim(0)"), std::string::npos);
  facts.program->arena_max = 2;
  EXPECT_EQ(advice("malloc_arenas"), "malloc_trim(0) returns the free part");
}

// Must fail if an amount of zero is printed as "0 B" instead of a word.
TEST(Findings, ZeroIsPrintedAsAWord) {
  DoctorFacts facts = training();
  facts.limits[0].page_cache_bytes = 0;
  facts.settings.swap_bytes = facts.settings.swap_free_bytes = kGiB;
  facts.program->children = {{1, 4242, StartMethod::fork, 0}};
  const std::string text = doctor_text(facts, true);
  for (const char* line : {"page_cache: no file pages are charged to the cgroup\n",
                           "swap: none of 1.00 GiB of swap in use\n",
                           "         process 1, forked by 4242, shares nothing\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
  EXPECT_EQ(text.find(" 0 B"), std::string::npos) << text;
}

// Must fail if the helper processes of multiprocessing count as children.
TEST(Findings, ChildrenAreCountedByStartMethod) {
  DoctorFacts facts = training();
  EXPECT_EQ(text_of(facts, "start_method"), "info none");
  facts.program->children = {{1, 4242, StartMethod::spawn, 0},
                             {2, 4242, StartMethod::fork, 0},
                             {3, 4242, StartMethod::fork, 0},
                             {4, 4242, StartMethod::helper, 0}};
  const std::vector<Finding> findings = findings_of(facts);
  EXPECT_EQ(text_of(facts, "start_method"), "info fork, spawn");
  EXPECT_EQ(find(findings, "start_method").summary, "children started 2 by fork, 1 by spawn");
  EXPECT_NE(find(findings, "start_method").advice.find("fork_exposure"), std::string::npos);
}

TEST(Findings, LargeHeapsAreWarnings) {
  DoctorFacts facts = training();
  facts.program->arena_heaps = 7;
  facts.program->kinds[MemoryKind::malloc_arenas] = 2 * kGiB;
  facts.program->kinds[MemoryKind::malloc_heap] = 500 * kMiB;
  EXPECT_EQ(text_of(facts, "malloc_arenas"), "warning 2048M");
  EXPECT_EQ(text_of(facts, "malloc_heap"), "info 500M");
  facts.program->kinds[MemoryKind::malloc_heap] = 3 * kGiB;
  EXPECT_EQ(text_of(facts, "malloc_heap"), "warning 3072M");
  facts.program->arena_max = 2;
  const std::vector<Finding> findings = findings_of(facts);
  EXPECT_EQ(find(findings, "malloc_arenas").summary,
            "2.00 GiB in 7 heaps of threads, used or retained; at most 2 arenas");
  facts.program->allocator = "jemalloc";
  EXPECT_EQ(text_of(facts, "malloc_arenas"), "info jemalloc");
  EXPECT_FALSE(has(facts, "malloc_heap"));
}

ProcessKinds process_of(int pid, uint64_t heap_mib, uint64_t anonymous_mib) {
  ProcessKinds process{.pid = pid, .name = "python"};
  process.kinds[MemoryKind::malloc_heap] = heap_mib * kMiB;
  process.kinds[MemoryKind::anonymous] = anonymous_mib * kMiB;
  process.kinds.file_bytes = 80 * kMiB;
  return process;
}

// Catches: a process that has begun or ended between the readings counts as growth; the growth of
// one process hides that another shrinks; the severity ignores the memory left.
TEST(Findings, GrowthIsThatOfProcessesInBothReadings) {
  DoctorFacts facts = training();
  facts.before = {process_of(5, 10, 100), process_of(6, 10, 300), process_of(7, 0, 900)};
  facts.after = {process_of(5, 10, 120), process_of(6, 14, 380), process_of(8, 0, 5000)};
  facts.between_s = 2;
  EXPECT_EQ(text_of(facts, "growth"), "warning 52M of 61440M");
  const std::vector<Finding> findings = findings_of(facts);
  EXPECT_EQ(
      find(findings, "growth").summary,
      "python (pid 6) grows: 52.00 MiB per second (within 2.0 s), of which anonymous mappings "
      "50.00 MiB; the 60.00 GiB left (cgroup v2 /job) last for 20 min");
  EXPECT_NE(find(findings, "growth").advice.find("modicum.memory.attribute"), std::string::npos);
  EXPECT_EQ(find(findings, "memory_kinds").summary,
            "5.39 GiB in 3 processes: anonymous mappings 5.37 GiB");
  EXPECT_EQ(limited_process(facts), 6);
  facts.program->pid = 5;
  const std::string heading = "; limits and settings of process 6 (python): ";
  EXPECT_NE(doctor_text(facts, false).find(heading), std::string::npos);
  facts.program->pid = 6;
  EXPECT_EQ(doctor_text(facts, false).find("limits and settings"), std::string::npos);
  facts.limits[0].available_bytes = 10 * kGiB;
  EXPECT_EQ(text_of(facts, "growth"), "danger 52M of 10240M");
  facts.limits[0].available_bytes = 8192 * kGiB;
  facts.limits[1].available_bytes = 8192 * kGiB;
  EXPECT_EQ(text_of(facts, "growth"), "info 52M of 8388608M");
  facts.after = facts.before;
  EXPECT_EQ(find(findings_of(facts), "growth").summary, "nothing grows (within 2.0 s)");
  EXPECT_EQ(limited_process(facts), 7) << "which holds most";
  EXPECT_EQ(limited_process(healthy()), 0);
  facts.between_s = 0;
  EXPECT_FALSE(has(facts, "growth"));
  EXPECT_TRUE(has(facts, "memory_kinds"));
}

TEST(Findings, PinnedBlocksAreRoundedWhereThereIsADevice) {
  DoctorFacts facts = training();
  facts.settings.locked_memory = ResourceLimit{8 * kMiB, 8 * kMiB};
  EXPECT_FALSE(has(facts, "pinned_rounding") || has(facts, "pinned_memory") ||
               has(facts, "swapped_out"));
  facts.program->uses_cuda = true;
  facts.program->locked_bytes = 4 * kMiB;
  facts.program->swapped_bytes = 16 * kMiB;
  EXPECT_EQ(text_of(facts, "pinned_memory"), "info 4M of 8M");
  EXPECT_EQ(text_of(facts, "pinned_rounding"), "info power of two");
  EXPECT_EQ(text_of(facts, "swapped_out"), "warning 16M");
  facts.program->torch_allocator_options = "pinned_use_background_threads:True";
  EXPECT_EQ(text_of(facts, "pinned_rounding"), "info power of two");
  facts.program->torch_allocator_options = "pinned_max_cached_size_mb:64";
  EXPECT_EQ(text_of(facts, "pinned_rounding"), "info bounded");
  facts.program->torch_allocator_options = "pinned_max_round_threshold_mb:64";
  EXPECT_EQ(text_of(facts, "pinned_rounding"), "info bounded");
}

TEST(Doctor, TextPutsDangersFirstWithTheirAdvice) {
  DoctorFacts facts = training();
  facts.settings.shm_bytes = facts.settings.shm_free_bytes = 64 * kMiB;
  facts.settings.huge_pages = "never";
  facts.program->exposed_bytes = 3 * kMiB;
  for (const int pid : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) {
    const auto shared = static_cast<uint64_t>(pid) * kKiB;
    facts.program->children.push_back({pid, 4242, StartMethod::fork, shared});
  }
  const std::string text = doctor_text(facts, false);
  EXPECT_TRUE(
      text.starts_with("process 4242 (python): 1 danger, 1 warning\n\n"
                       "DANGER   shm_size: /dev/shm has 64.00 MiB, 64.00 MiB free\n"
                       "         -> batches"))
      << text;
  EXPECT_LT(text.find("WARNING  transparent_huge_pages: never\n         -> "),
            text.find("info     fork_exposure: 3.00 MiB is shared with forked children: writes "
                      "copy it\n         process 10, forked by 4242, shares 10.00 KiB\n"));
  EXPECT_NE(text.find("shares 3.00 KiB\n         and 2 more\n"), std::string::npos);
  EXPECT_EQ(text.find("nothing to do"), std::string::npos);
  EXPECT_NE(doctor_text(facts, true).find("nothing to do"), std::string::npos);
  EXPECT_TRUE(doctor_text(healthy(), false).starts_with("this machine: no dangers, no warnings\n"));
}

TEST(Doctor, JsonHasTheContractsKeys) {
  DoctorFacts facts = healthy();
  facts.limits.resize(1);
  facts.settings = {};
  const std::string machine = doctor_json(facts);
  EXPECT_TRUE(machine.starts_with(
      R"({"findings":[{"id":"shm_size","value":"none","limit_bytes":null,"severity":"warning",)"))
      << machine;
  EXPECT_NE(machine.find(R"({"id":"cgroup_memory","value":42949672960,"limit_bytes":107374182400,)"
                         R"("severity":"info","summary":)"),
            std::string::npos)
      << machine;
  facts.program = Program{.pid = 7,
                          .name = "python",
                          .children = {{8, 7, StartMethod::fork, 4096},
                                       {9, 7, StartMethod::exec, 0},
                                       {10, 9, StartMethod::forkserver, 8192}},
                          .exposed_bytes = 12288};
  EXPECT_TRUE(doctor_json(facts).starts_with(
      R"({"pid":7,"name":"python","fork_exposure_bytes":12288,"sharers":[)"
      R"({"pid":8,"ppid":7,"shared_bytes":4096},{"pid":10,"ppid":9,"shared_bytes":8192}],)"
      R"("findings":[)"))
      << doctor_json(facts);
  facts.before = {process_of(7, 1, 2)};
  facts.after = {process_of(7, 1, 4)};
  facts.between_s = 0.5;
  EXPECT_NE(doctor_json(facts).find(
                R"("memory":[{"pid":7,"name":"python","kinds":{"malloc_heap":1048576,)"
                R"("malloc_arenas":0,"stacks":0,"file_copies":0,"anonymous":4194304,)"
                R"("shared_memory":0},"file_bytes":83886080}],"growth":{"seconds":0.5,)"
                R"("bytes_per_s":4194304,"kinds":{"malloc_heap":0,)"),
            std::string::npos)
      << doctor_json(facts);
}

}  // namespace
}  // namespace modicum
