// The rules of `doctor` for the memory of a running program: what it holds by kind, and what grows.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "modicum/report/findings.h"
#include "modicum/report/growth.h"
#include "modicum/report/owners.h"

namespace modicum {
namespace {

// "anonymous mappings 1.20 GiB, stacks 3.00 MiB": the largest kinds, without those below 1 %.
std::string kinds_text(const MemoryKinds& kinds) {
  std::vector<std::pair<uint64_t, size_t>> largest;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    if (kinds.bytes[kind] > kinds.total() / 100) largest.emplace_back(kinds.bytes[kind], kind);
  }
  std::sort(largest.begin(), largest.end(), std::greater<>());
  std::string text;
  for (const auto& [bytes, kind] : largest) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ",
                        owner_words(memory_kind_name(static_cast<MemoryKind>(kind))),
                        format_size(bytes));
  }
  return text;
}

std::string time_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  return seconds < 7200 ? fmt::format("{:.0f} min", seconds / 60)
                        : fmt::format("{:.0f} h", seconds / 3600);
}

Severity severity_of_growth(double seconds_left) {
  constexpr double kSoon_s = 600, kThisDay_s = 86'400;
  if (seconds_left < kSoon_s) return Severity::danger;
  return seconds_left < kThisDay_s ? Severity::warning : Severity::info;
}

void add_kinds(const DoctorFacts& facts, Findings& found) {
  MemoryKinds all;
  for (const ProcessKinds& process : facts.after) {
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) all.bytes[kind] += process.kinds.bytes[kind];
    all.file_bytes += process.kinds.file_bytes;
  }
  const std::string in =
      facts.after.size() == 1 ? std::string() : fmt::format(" in {} processes", facts.after.size());
  found.push_back(
      {.id = "memory_kinds",
       .value = all.total(),
       .summary = fmt::format("{}{}: {}", format_size(all.total()), in, kinds_text(all)),
       .advice = fmt::format("pages that forked processes share count in each; besides, "
                             "{} of page cache are mapped, which the kernel gives up",
                             format_size(all.file_bytes))});
}

void add_growth(const DoctorFacts& facts, Findings& found) {
  const KindsGrowth growth = growth_of(facts);
  const double rate = growth.total();
  Finding finding{.id = "growth",
                  .value = static_cast<uint64_t>(std::max(0.0, rate)),
                  .summary = fmt::format("nothing grows (within {:.1f} s)", facts.between_s),
                  .advice = "a slow growth needs a longer --interval"};
  if (growth.most == nullptr) {
    found.push_back(std::move(finding));
    return;
  }
  const MemoryKind kind = growth.largest();
  const double of_kind = growth.bytes_per_s[static_cast<size_t>(kind)];
  finding.summary =
      fmt::format("{} (pid {}) grows: {} per second (within {:.1f} s), of which {} {}",
                  printable(growth.most->name), growth.most->pid,
                  format_size(static_cast<uint64_t>(rate)), facts.between_s,
                  owner_words(memory_kind_name(kind)), format_size(static_cast<uint64_t>(of_kind)));
  finding.advice = next_step(owner_of(kind), growth.most->pid);
  if (!facts.limits.empty()) {
    const uint64_t left = available_bytes(facts);
    const double seconds_left = static_cast<double>(left) / rate;
    finding.limit_bytes = left;
    finding.severity = severity_of_growth(seconds_left);
    finding.summary += fmt::format("; the {} left ({}) last for {}", format_size(left),
                                   facts.limits.front().source, time_text(seconds_left));
  }
  found.push_back(std::move(finding));
}

}  // namespace

double KindsGrowth::total() const noexcept {
  return std::accumulate(bytes_per_s.begin(), bytes_per_s.end(), 0.0);
}

MemoryKind KindsGrowth::largest() const noexcept {
  const auto fastest = std::max_element(bytes_per_s.begin(), bytes_per_s.end());
  return static_cast<MemoryKind>(fastest - bytes_per_s.begin());
}

KindsGrowth growth_of(const DoctorFacts& facts) {
  KindsGrowth growth;
  int64_t most_bytes = 0;
  for (const ProcessKinds& after : facts.after) {
    const auto before =
        std::find_if(facts.before.begin(), facts.before.end(),
                     [&](const ProcessKinds& process) { return process.pid == after.pid; });
    if (before == facts.before.end() || facts.between_s <= 0) continue;
    int64_t bytes = 0;
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
      const auto gained = static_cast<int64_t>(after.kinds.bytes[kind]) -
                          static_cast<int64_t>(before->kinds.bytes[kind]);
      growth.bytes_per_s[kind] += static_cast<double>(gained) / facts.between_s;
      bytes += gained;
    }
    if (bytes <= most_bytes) continue;
    most_bytes = bytes;
    growth.most = &after;
  }
  constexpr double kLeastBytes = 1 * kMiB;
  const double rate = growth.total();
  if (rate * facts.between_s < kLeastBytes) growth.most = nullptr;
  return growth;
}

int limited_process(const DoctorFacts& facts) {
  if (facts.after.empty()) return 0;
  if (const ProcessKinds* const most = growth_of(facts).most) return most->pid;
  const auto holds_less = [](const ProcessKinds& a, const ProcessKinds& b) {
    return a.kinds.total() < b.kinds.total();
  };
  return std::max_element(facts.after.begin(), facts.after.end(), holds_less)->pid;
}

void add_growth_findings(const DoctorFacts& facts, Findings& found) {
  if (facts.after.empty()) return;
  add_kinds(facts, found);
  if (facts.between_s > 0) add_growth(facts, found);
}

}  // namespace modicum
