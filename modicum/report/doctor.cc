#include "modicum/report/doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "modicum/json/json.h"

namespace modicum {
namespace {

// Where PID is a launcher's: whose limits and settings the findings have. Else empty.
std::string limited_text(const DoctorFacts& facts) {
  const int limited = limited_process(facts);
  if (!facts.program || limited == facts.program->pid) return "";
  const auto process = std::ranges::find(facts.after, limited, &ProcessKinds::pid);
  if (process == facts.after.end()) return "";
  return fmt::format("; limits and settings of process {} ({})", limited, printable(process->name));
}

// The children that were forked: they may share pages.
std::vector<ChildProcess> sharers_of(const Program& program) {
  std::vector<ChildProcess> sharers;
  std::copy_if(program.children.begin(), program.children.end(), std::back_inserter(sharers),
               [](const ChildProcess& child) {
                 return child.method == StartMethod::fork ||
                        child.method == StartMethod::forkserver;
               });
  return sharers;
}

void finding_object(JsonWriter& out, const Finding& finding) {
  out.begin_object().member("id", finding.id).key("value");
  std::visit([&out](const auto& value) { out.value(value); }, finding.value);
  out.member("limit_bytes", finding.limit_bytes);
  if (finding.limit_count) out.member("limit_count", *finding.limit_count);
  out.member("severity", severity_name(finding.severity));
  out.member("summary", finding.summary).member("advice", finding.advice).end_object();
}

void memory_members(JsonWriter& out, const DoctorFacts& facts) {
  if (facts.after.empty()) return;
  out.member("limited_pid", limited_process(facts)).key("memory").begin_array();
  for (const ProcessKinds& process : facts.after) {
    out.begin_object().member("pid", process.pid).member("name", printable(process.name));
    out.key("kinds").begin_object();
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
      out.member(memory_kind_name(static_cast<MemoryKind>(kind)), process.kinds.bytes[kind]);
    }
    out.end_object().member("file_bytes", process.kinds.file_bytes).end_object();
  }
  out.end_array();
  if (facts.between_s <= 0) return;
  const KindsGrowth growth = growth_of(facts);
  out.key("growth").begin_object().member("seconds", facts.between_s);
  out.member("bytes_per_s", std::llround(growth.total())).key("kinds").begin_object();
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    out.member(memory_kind_name(static_cast<MemoryKind>(kind)),
               std::llround(growth.bytes_per_s[kind]));
  }
  out.end_object().end_object();
}

std::string count_text(const std::vector<Finding>& findings) {
  const auto count = [&](Severity severity) {
    return std::count_if(findings.begin(), findings.end(),
                         [&](const Finding& finding) { return finding.severity == severity; });
  };
  const auto dangers = count(Severity::danger);
  const auto warnings = count(Severity::warning);
  if (dangers + warnings == 0) return "no dangers, no warnings";
  return fmt::format("{} danger{}, {} warning{}", dangers, dangers == 1 ? "" : "s", warnings,
                     warnings == 1 ? "" : "s");
}

std::string sharers_text(const Program& program) {
  constexpr size_t kMost = 8;
  std::vector<ChildProcess> sharers = sharers_of(program);
  std::stable_sort(sharers.begin(), sharers.end(),
                   [](const auto& a, const auto& b) { return a.shared_bytes > b.shared_bytes; });
  std::string text;
  for (size_t i = 0; i < std::min(sharers.size(), kMost); ++i) {
    const uint64_t shared = sharers[i].shared_bytes;
    text += fmt::format("         process {}, forked by {}, shares {}\n", sharers[i].pid,
                        sharers[i].parent, shared == 0 ? "nothing" : format_size(shared));
  }
  if (sharers.size() > kMost) text += fmt::format("         and {} more\n", sharers.size() - kMost);
  return text;
}

}  // namespace

std::string_view severity_name(Severity severity) noexcept {
  constexpr std::array<std::string_view, 3> kNames = {"info", "warning", "danger"};
  return kNames[static_cast<size_t>(severity)];
}

std::string doctor_json(const DoctorFacts& facts) {
  JsonWriter out;
  out.begin_object();
  if (facts.program) {
    out.member("pid", facts.program->pid).member("name", printable(facts.program->name));
    out.member("fork_exposure_bytes", facts.program->exposed_bytes);
    out.key("sharers").begin_array();
    for (const ChildProcess& child : sharers_of(*facts.program)) {
      out.begin_object().member("pid", child.pid).member("ppid", child.parent);
      out.member("shared_bytes", child.shared_bytes).end_object();
    }
    out.end_array();
    memory_members(out, facts);
  }
  out.key("findings").begin_array();
  for (const Finding& finding : findings_of(facts)) finding_object(out, finding);
  return out.end_array().end_object().text();
}

std::string doctor_text(const DoctorFacts& facts, bool verbose) {
  const std::vector<Finding> findings = findings_of(facts);
  std::string text = facts.program ? fmt::format("process {} ({})", facts.program->pid,
                                                 printable(facts.program->name))
                                   : "this machine";
  text += fmt::format("{}: {}\n\n", limited_text(facts), count_text(findings));
  for (const Finding& finding : findings) {
    constexpr std::array<std::string_view, 3> kLabels = {"info", "WARNING", "DANGER"};
    text += fmt::format("{:<8} {}: {}\n", kLabels[static_cast<size_t>(finding.severity)],
                        finding.id, finding.summary);
    if (finding.id == "fork_exposure") text += sharers_text(*facts.program);
    if (verbose || finding.severity != Severity::info)
      text += fmt::format("         -> {}\n", finding.advice);
  }
  return text;
}

}  // namespace modicum
