// The rules of `doctor` for a running program.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "modicum/report/findings.h"

namespace modicum {
namespace {

// Whether a finding about `bytes` gets advice. From 64 MiB on it does, even if they are too few for
// a warning: they may grow, and each rank may hold as many.
bool is_worth_advice(const DoctorFacts& facts, uint64_t bytes) {
  return bytes >= 64 * kMiB || is_large(facts, bytes);
}

void add_forks(const DoctorFacts& facts, Findings& found) {
  const Program& program = *facts.program;
  const uint64_t left = available_bytes(facts);
  const bool is_any = program.exposed_bytes > 0;
  const bool is_danger = !facts.limits.empty() && program.exposed_bytes > left;
  Finding exposure{
      .id = "fork_exposure",
      .value = program.exposed_bytes,
      .severity = is_danger                                ? Severity::danger
                  : is_large(facts, program.exposed_bytes) ? Severity::warning
                                                           : Severity::info,
      .summary = is_any ? fmt::format("{} is shared with forked children: writes copy it",
                                      format_size(program.exposed_bytes))
                        : "nothing is shared with forked children",
      .advice = is_danger || is_worth_advice(facts, program.exposed_bytes)
                    ? "keep it out of forked children: fork=\"excluded\" (the default of Modicum), "
                      "modicum.torch.protect for tensors and optimizers of other libraries, or "
                      "madvise(MADV_DONTFORK); or don't fork: "
                      "multiprocessing.get_context(\"forkserver\") or \"spawn\", "
                      "DataLoader(multiprocessing_context=\"forkserver\")"
                    : "nothing to do"};
  if (!facts.limits.empty()) exposure.limit_bytes = left;
  found.push_back(std::move(exposure));
  if (program.copied_bytes == 0) return;
  found.push_back(
      {.id = "fork_copies",
       .value = program.copied_bytes,
       .severity = is_large(facts, program.copied_bytes) ? Severity::warning : Severity::info,
       .summary = fmt::format("{} has been copied since the fork and is held twice",
                              format_size(program.copied_bytes)),
       .advice = "it is free again when the children end: see fork_exposure, and "
                 "modicum.memory.attribute, which names its owners"});
}

void add_start_method(const DoctorFacts& facts, Findings& found) {
  constexpr std::array<StartMethod, 4> kShown = {StartMethod::fork, StartMethod::spawn,
                                                 StartMethod::forkserver, StartMethod::exec};
  std::vector<std::string> names, counts;
  for (const StartMethod method : kShown) {
    const auto& children = facts.program->children;
    const auto n = std::count_if(children.begin(), children.end(),
                                 [&](const ChildProcess& child) { return child.method == method; });
    if (n == 0) continue;
    names.emplace_back(start_method_name(method));
    counts.push_back(fmt::format("{} by {}", n, start_method_name(method)));
  }
  const bool has_forks = !names.empty() && names[0] == "fork";
  found.push_back(
      {.id = "start_method",
       .value = names.empty() ? std::string("none") : fmt::format("{}", fmt::join(names, ", ")),
       .summary = names.empty() ? std::string("no children")
                                : fmt::format("children started {}", fmt::join(counts, ", ")),
       .advice = has_forks ? "forked children share their parent's memory: see fork_exposure; "
                             "children started by \"spawn\" or \"forkserver\" don't"
                           : "nothing to do: no child shares this process's memory"});
}

Severity severity_of_heap(const DoctorFacts& facts, uint64_t bytes) {
  return is_large(facts, bytes) ? Severity::warning : Severity::info;
}

void add_heaps(const DoctorFacts& facts, Findings& found) {
  const Program& program = *facts.program;
  if (!program.allocator.empty()) {
    found.push_back({.id = "malloc_arenas",
                     .value = program.allocator,
                     .summary = fmt::format("{} replaces glibc's malloc", program.allocator),
                     .advice = "its own options bound the memory that it retains"});
    return;
  }
  const uint64_t arenas = program.kinds[MemoryKind::malloc_arenas];
  const uint64_t heap = program.kinds[MemoryKind::malloc_heap];
  const std::string max = program.arena_max ? "at most " + counted(*program.arena_max, "arena")
                                            : "MALLOC_ARENA_MAX not set";
  const bool has_few = program.arena_max && *program.arena_max <= 2;
  found.push_back({.id = "malloc_arenas",
                   .value = arenas,
                   .severity = severity_of_heap(facts, arenas),
                   .summary = (arenas == 0 ? "nothing in heaps of threads"
                                           : fmt::format("{} in {} of threads, used or retained",
                                                         format_size(arenas),
                                                         counted(program.arena_heaps, "heap"))) +
                              "; " + max,
                   .advice = !is_worth_advice(facts, arenas) ? "nothing to do"
                             : has_few ? "malloc_trim(0) returns the free part"
                                       : "malloc_trim(0) returns the free part; start with "
                                         "MALLOC_ARENA_MAX=2 for fewer heaps"});
  found.push_back({.id = "malloc_heap",
                   .value = heap,
                   .severity = severity_of_heap(facts, heap),
                   .summary = heap == 0 ? "nothing in the main heap"
                                        : fmt::format("{} in the main heap, used or retained",
                                                      format_size(heap)),
                   .advice = !is_worth_advice(facts, heap)
                                 ? "nothing to do"
                                 : "malloc_trim(0) returns the free part; start with "
                                   "MALLOC_MMAP_THRESHOLD_=262144 to keep large blocks "
                                   "out of the heap"});
}

void add_pinned(const DoctorFacts& facts, Findings& found) {
  const Program& program = *facts.program;
  if (program.locked_bytes > 0) {
    Finding finding{
        .id = "pinned_memory",
        .value = program.locked_bytes,
        .summary = fmt::format("{} is locked or pinned", format_size(program.locked_bytes)),
        .advice = "nothing to do; it can neither be swapped nor reclaimed"};
    const auto& limit = facts.settings.locked_memory;
    if (limit && !limit->is_unlimited()) finding.limit_bytes = limit->soft;
    found.push_back(std::move(finding));
  }
  if (!program.uses_cuda) return;
  // Either option sets a size above which blocks are not rounded.
  const auto has = [&](std::string_view option) {
    return program.torch_allocator_options.find(option) != std::string::npos;
  };
  const bool is_bounded = has("pinned_max_round_threshold_mb") || has("pinned_max_cached_size_mb");
  found.push_back({.id = "pinned_rounding",
                   .value = std::string(is_bounded ? "bounded" : "power of two"),
                   .summary = is_bounded ? "torch does not round large pinned blocks up"
                                         : "torch rounds each pinned block up to a power of two "
                                           "and keeps it: 65 GiB hold 128 GiB",
                   .advice = is_bounded
                                 ? "nothing to do"
                                 : "start with PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64 "
                                   "(torch 2.13); torch.cuda.host_memory_stats() shows the sum"});
}

void add_swapped(const DoctorFacts& facts, Findings& found) {
  if (facts.program->swapped_bytes == 0) return;
  found.push_back({.id = "swapped_out",
                   .value = facts.program->swapped_bytes,
                   .severity = Severity::warning,
                   .summary = fmt::format("{} of this process is in swap",
                                          format_size(facts.program->swapped_bytes)),
                   .advice = "RSS does not count it, and each step that touches it waits for the "
                             "disk: see swap"});
}

}  // namespace

void add_program_findings(const DoctorFacts& facts, Findings& found) {
  add_forks(facts, found);
  add_start_method(facts, found);
  add_heaps(facts, found);
  add_pinned(facts, found);
  add_swapped(facts, found);
}

}  // namespace modicum
