// The rules of `doctor` for a machine: each function adds the findings of one subject.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "modicum/report/findings.h"

namespace modicum {
namespace {

bool is_of_cgroup(const MemoryLimit& limit) { return limit.source.starts_with("cgroup"); }

// The tightest limit of a cgroup; if no cgroup has one, the node's.
const MemoryLimit* tightest(const DoctorFacts& facts) {
  const auto group = std::find_if(facts.limits.begin(), facts.limits.end(), is_of_cgroup);
  if (group != facts.limits.end()) return &*group;
  return facts.limits.empty() ? nullptr : &facts.limits.front();
}

// ---- memory

Severity severity_of_rest(uint64_t rest, uint64_t limit) {
  if (rest < limit / 20) return Severity::danger;
  return rest < limit / 4 ? Severity::warning : Severity::info;
}

void add_memory(const DoctorFacts& facts, Findings& found) {
  for (const MemoryLimit& limit : facts.limits) {
    const bool is_node = !is_of_cgroup(limit);
    found.push_back(
        {.id = is_node ? "node_memory" : "cgroup_memory",
         .value = limit.limit_bytes - std::min(limit.limit_bytes, limit.available_bytes),
         .limit_bytes = limit.limit_bytes,
         .severity = severity_of_rest(limit.available_bytes, limit.limit_bytes),
         .summary = fmt::format("{} of {} left ({})", format_size(limit.available_bytes),
                                format_size(limit.limit_bytes), is_node ? "node" : limit.source),
         .advice = is_node ? "above it the kernel ends a process of the node: plan with "
                             "`modicum plan --budget`, and end other programs"
                           : "above it the kernel ends a process of the group: raise the job's "
                             "memory request, or plan with `modicum plan --budget`; "
                             "free(1) and psutil show the node, not this limit"});
  }
  if (std::none_of(facts.limits.begin(), facts.limits.end(), is_of_cgroup)) {
    found.push_back({.id = "cgroup_memory",
                     .value = std::string("none"),
                     .summary = "no memory limit in the cgroup chain",
                     .advice = "nothing to do: the node's memory is the limit"});
  }
}

void add_charged(const DoctorFacts& facts, Findings& found) {
  const MemoryLimit* const limit = tightest(facts);
  if (limit == nullptr) return;
  const std::string_view owner = is_of_cgroup(*limit) ? "the cgroup" : "the node";
  // Bytes that the kernel can't give up. The limit is nearly reached if these and the file pages
  // take more than 90 % of it; file pages are to blame if they take more than half of it.
  const uint64_t firm = limit->limit_bytes - std::min(limit->limit_bytes, limit->available_bytes);
  const bool is_full = limit->page_cache_bytes > limit->limit_bytes / 2 &&
                       firm + limit->page_cache_bytes > limit->limit_bytes / 10 * 9;
  const std::string file_pages =
      limit->page_cache_bytes == 0 ? "no" : format_size(limit->page_cache_bytes) + " of";
  found.push_back({.id = "page_cache",
                   .value = limit->page_cache_bytes,
                   .limit_bytes = limit->limit_bytes,
                   .severity = is_full && is_of_cgroup(*limit) ? Severity::warning : Severity::info,
                   .summary = fmt::format("{} file pages are charged to {}", file_pages, owner),
                   .advice = "the kernel gives them up before it ends a process, but reads slow "
                             "down: watch anon and shmem of memory.stat, not the group's usage"});
  if (limit->shmem_bytes == 0) return;
  const bool is_much = limit->shmem_bytes > limit->limit_bytes / 10;
  found.push_back({.id = "shmem",
                   .value = limit->shmem_bytes,
                   .limit_bytes = limit->limit_bytes,
                   .severity = is_much ? Severity::warning : Severity::info,
                   .summary = fmt::format("{} of shared memory and tmpfs files are charged to {}",
                                          format_size(limit->shmem_bytes), owner),
                   .advice = "it stays until its files are removed: delete what ended jobs left "
                             "in /dev/shm and other tmpfs mounts"});
}

void add_kills(const DoctorFacts& facts, Findings& found) {
  if (facts.oom_kills == 0) return;
  found.push_back(
      {.id = "oom_kills",
       .value = facts.oom_kills,
       .severity = Severity::warning,
       .summary = "the cgroup chain has had " + counted(facts.oom_kills, "OOM kill"),
       .advice = "`dmesg | grep -i oom` names the processes; `modicum plan --budget` tells whether "
                 "the job fits the limit"});
}

void add_budget(const DoctorFacts& facts, Findings& found) {
  if (!facts.budget_bytes || facts.limits.empty()) return;
  const uint64_t left = available_bytes(facts);
  const bool fits = *facts.budget_bytes <= left;
  found.push_back(
      {.id = "budget",
       .value = *facts.budget_bytes,
       .limit_bytes = left,
       .severity = fits ? Severity::info : Severity::danger,
       .summary = fmt::format("a budget of {}, {} left ({})", format_size(*facts.budget_bytes),
                              format_size(left), facts.limits.front().source),
       .advice = fits ? "nothing to do"
                      : "a run that uses all of it is ended by the kernel: raise the "
                        "limit, or lower the budget"});
}

void add_swap(const DoctorFacts& facts, Findings& found) {
  const Settings& settings = facts.settings;
  if (!settings.swap_bytes) return;
  const uint64_t used =
      *settings.swap_bytes - std::min(*settings.swap_bytes, settings.swap_free_bytes);
  const bool is_used = used > *settings.swap_bytes / 20;
  found.push_back(
      {.id = "swap",
       .value = used,
       .limit_bytes = settings.swap_bytes,
       .severity = is_used ? Severity::warning : Severity::info,
       .summary = *settings.swap_bytes == 0 ? std::string("no swap")
                                            : fmt::format("{} of {} of swap in use",
                                                          used == 0 ? "none" : format_size(used),
                                                          format_size(*settings.swap_bytes)),
       .advice = *settings.swap_bytes == 0
                     ? "nothing to do; without swap, memory over a limit ends a process immediately"
                     : "memory in swap is missing from RSS, and a step waits for the disk: "
                       "`swapoff -a`, or vm.swappiness=0, while training"});
}

void add_overcommit(const DoctorFacts& facts, Findings& found) {
  const Settings& settings = facts.settings;
  if (!settings.overcommit) return;
  Finding finding{.id = "overcommit", .value = *settings.overcommit};
  if (*settings.overcommit == 2) {
    const uint64_t rest = settings.commit_limit_bytes -
                          std::min(settings.commit_limit_bytes, settings.committed_bytes);
    const bool is_near = !facts.limits.empty() && rest < available_bytes(facts) / 2;
    finding.limit_bytes = settings.commit_limit_bytes;
    finding.severity = is_near ? Severity::danger : Severity::warning;
    finding.summary = fmt::format("strict (2): {} of {} may still be allocated, touched or not",
                                  format_size(rest), format_size(settings.commit_limit_bytes));
    finding.advice =
        "mmap and fork fail above it although memory is free: `sysctl vm.overcommit_memory=0`, or "
        "raise vm.overcommit_ratio";
  } else {
    finding.summary = *settings.overcommit == 1 ? "always (1)" : "heuristic (0)";
    finding.advice =
        "nothing to do: memory counts when it is touched, and an allocation that "
        "succeeds does not prove that it fits";
  }
  found.push_back(std::move(finding));
}

// ---- settings

void add_locked_memory(const DoctorFacts& facts, Findings& found) {
  const Settings& settings = facts.settings;
  if (!settings.locked_memory) return;
  const uint64_t soft = settings.locked_memory->soft;
  const MemoryLimit* const limit = tightest(facts);
  const bool is_free = settings.locked_memory->is_unlimited() || settings.may_lock_all;
  const bool is_enough = is_free || (limit != nullptr && soft >= limit->limit_bytes);
  Finding finding{.id = "memlock",
                  .value = soft,
                  .severity = is_enough ? Severity::info : Severity::warning,
                  .summary = fmt::format("at most {} of locked memory", format_size(soft)),
                  .advice =
                      "mlock, and memory registered for RDMA or io_uring, fails above it: "
                      "`ulimit -l unlimited`, docker --ulimit memlock=-1, systemd "
                      "LimitMEMLOCK=infinity"};
  if (!settings.locked_memory->is_unlimited()) finding.limit_bytes = soft;
  if (settings.locked_memory->is_unlimited()) {
    finding.value = std::string("unlimited");
    finding.summary = "locked memory is not limited";
  } else if (settings.may_lock_all) {
    finding.summary += ", which does not bind this process (CAP_IPC_LOCK)";
  }
  if (is_enough) finding.advice = "nothing to do";
  found.push_back(std::move(finding));
}

void add_huge_pages(const DoctorFacts& facts, Findings& found) {
  const Settings& settings = facts.settings;
  if (!settings.huge_pages.empty()) {
    const bool is_never = settings.huge_pages == "never";
    const bool is_always = settings.huge_pages == "always";
    found.push_back(
        {.id = "transparent_huge_pages",
         .value = settings.huge_pages,
         .severity = is_never ? Severity::warning : Severity::info,
         .summary = settings.huge_pages,
         .advice = is_never ? "the first write to new memory is about four times slower: `echo "
                              "madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
                   : is_always
                       ? "memory that is touched sparsely is charged by 2 MiB: madvise avoids it"
                       : "nothing to do: Modicum asks for huge pages where it needs them"});
  }
  if (settings.shmem_huge_pages.empty()) return;
  const bool has_none = settings.shmem_huge_pages == "never" || settings.shmem_huge_pages == "deny";
  found.push_back({.id = "shmem_huge_pages",
                   .value = settings.shmem_huge_pages,
                   .summary = settings.shmem_huge_pages,
                   .advice = has_none ? "memory of fork=\"shared\" has small pages, and is slower "
                                        "to allocate: `echo advise > "
                                        "/sys/kernel/mm/transparent_hugepage/shmem_enabled`"
                                      : "nothing to do"});
}

void add_shm(const DoctorFacts& facts, Findings& found) {
  const Settings& settings = facts.settings;
  Finding finding{.id = "shm_size",
                  .value = std::string("none"),
                  .severity = Severity::warning,
                  .summary = "there is no /dev/shm",
                  .advice =
                      "batches of data-loader workers pass through it; if it is full, a worker "
                      "ends with a bus error: docker --shm-size=16g or --ipc=host; "
                      "Kubernetes: an emptyDir of medium Memory at /dev/shm"};
  if (settings.shm_bytes) {
    constexpr uint64_t kDockersDefault = 64 * kMiB;
    const bool is_tiny =
        *settings.shm_bytes <= kDockersDefault || settings.shm_free_bytes < kDockersDefault;
    const bool is_small = settings.shm_free_bytes < kGiB;
    finding.value = *settings.shm_bytes - std::min(*settings.shm_bytes, settings.shm_free_bytes);
    finding.limit_bytes = settings.shm_bytes;
    finding.severity = is_tiny ? Severity::danger : is_small ? Severity::warning : Severity::info;
    finding.summary = fmt::format("/dev/shm has {}, {} free", format_size(*settings.shm_bytes),
                                  format_size(settings.shm_free_bytes));
    if (!is_tiny && !is_small) finding.advice = "nothing to do";
  }
  found.push_back(std::move(finding));
}

void add_address_space(const DoctorFacts& facts, Findings& found) {
  const auto& limit = facts.settings.address_space;
  if (!limit || limit->is_unlimited()) return;
  found.push_back({.id = "address_space",
                   .value = limit->soft,
                   .limit_bytes = limit->soft,
                   .severity = Severity::warning,
                   .summary = fmt::format("at most {} of addresses", format_size(limit->soft)),
                   .advice = "reserved addresses count although they use no memory, and CUDA "
                             "reserves more than the node has: `ulimit -v unlimited`"});
}

// The severity of a limit on a count. The count is known only with --pid; if it is unknown, a limit
// below `usual` is a warning.
Severity severity_of_count(std::optional<uint64_t> count, uint64_t limit, uint64_t usual) {
  if (!count) return limit < usual ? Severity::warning : Severity::info;
  if (*count > limit / 10 * 9) return Severity::danger;
  return *count > limit / 2 ? Severity::warning : Severity::info;
}

void add_mappings(const DoctorFacts& facts, Findings& found) {
  const auto& most = facts.settings.max_map_count;
  if (!most) return;
  constexpr uint64_t kLinuxDefault = 65530;
  std::optional<uint64_t> count;
  if (facts.program) count = facts.program->mappings;
  const Severity severity = severity_of_count(count, *most, kLinuxDefault);
  found.push_back(
      {.id = "max_map_count",
       .value = count.value_or(*most),
       .limit_count = *most,
       .severity = severity,
       .summary = count ? fmt::format("{} of at most {} mappings", *count, *most)
                        : fmt::format("at most {} mappings per process", *most),
       .advice = severity == Severity::info
                     ? "nothing to do; each tensor in shared memory is a mapping"
                     : "mmap and malloc fail above it: `sysctl vm.max_map_count=1048576`"});
}

void add_open_files(const DoctorFacts& facts, Findings& found) {
  const auto& limit = facts.settings.open_files;
  if (!limit) return;
  constexpr uint64_t kUsual = 4096;
  std::optional<uint64_t> count;
  if (facts.program) count = facts.program->open_files;
  const Severity severity = severity_of_count(count, limit->soft, kUsual);
  const std::string soft = limit->is_unlimited() ? "unlimited" : fmt::format("{}", limit->soft);
  const std::string hard = limit->hard == UINT64_MAX ? "unlimited" : fmt::format("{}", limit->hard);
  found.push_back({.id = "nofile",
                   .value = count.value_or(limit->soft),
                   .limit_count = limit->soft,
                   .severity = severity,
                   .summary = count ? fmt::format("{} of {} files open", *count, soft)
                                    : fmt::format("at most {} open files per process", soft),
                   .advice = severity == Severity::info
                                 ? "nothing to do"
                                 : fmt::format("each tensor that a data-loader worker sends is an "
                                               "open file: `ulimit -n {}`",
                                               hard)});
}

}  // namespace

uint64_t available_bytes(const DoctorFacts& facts) {
  return facts.limits.empty() ? UINT64_MAX : facts.limits.front().available_bytes;
}

bool is_large(const DoctorFacts& facts, uint64_t bytes) {
  return bytes > kGiB || bytes > available_bytes(facts) / 10;
}

std::vector<Finding> findings_of(const DoctorFacts& facts) {
  using Rule = void (*)(const DoctorFacts&, Findings&);
  constexpr std::array<Rule, 12> kOfMachine = {add_memory,   add_budget,        add_charged,
                                               add_kills,    add_swap,          add_overcommit,
                                               add_shm,      add_locked_memory, add_huge_pages,
                                               add_mappings, add_open_files,    add_address_space};
  Findings found;
  add_growth_findings(facts, found);
  if (facts.program) add_program_findings(facts, found);
  for (const Rule rule : kOfMachine) rule(facts, found);
  std::stable_sort(found.begin(), found.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  return found;
}

}  // namespace modicum
