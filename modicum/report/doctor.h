// The findings of `doctor`: settings and limits of the machine, and properties of a program, that
// cost host memory or may end the program. They depend on nothing but the DoctorFacts. Part of the
// public header of `report`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "modicum/probe/probe.h"

namespace modicum {

struct DoctorFacts {
  // The memory_limits, OOM kills and settings are those of limited_process; without --pid, those of
  // the caller.
  std::vector<MemoryLimit> limits;
  uint64_t oom_kills = 0;
  Settings settings;
  std::optional<Program> program;  // with --pid
  // The kinds of memory of the program and its descendants, read twice; empty if not read.
  std::vector<ProcessKinds> before;
  std::vector<ProcessKinds> after;
  double between_s = 0;
  std::optional<uint64_t> budget_bytes;
};

enum class Severity : uint8_t { info, warning, danger };
std::string_view severity_name(Severity severity) noexcept;

struct Finding {
  std::string_view id;
  std::variant<uint64_t, std::string> value;  // bytes, a count, or a word ("madvise", "none")
  std::optional<uint64_t> limit_bytes;
  std::optional<uint64_t> limit_count;  // of descriptors or mappings
  Severity severity = Severity::info;
  std::string summary;  // one line
  std::string advice;   // one line
};

// Sorted by severity, dangers first.
std::vector<Finding> findings_of(const DoctorFacts& facts);

// What the processes that are in both readings have gained per second, by kind.
struct KindsGrowth {
  std::array<double, kMemoryKinds> bytes_per_s{};
  // In `after`: the process that gained most; null if all together gained less than 1 MiB.
  const ProcessKinds* most = nullptr;

  double total() const noexcept;
  MemoryKind largest() const noexcept;
};
KindsGrowth growth_of(const DoctorFacts& facts);
// The pid of the process whose limits end the program first: the one that grows, or else the one
// that holds most. A launcher may be outside of their cgroup. 0 without processes in `after`.
int limited_process(const DoctorFacts& facts);

std::string doctor_json(const DoctorFacts& facts);
// With `verbose`, each finding is followed by its advice; otherwise only dangers and warnings are.
std::string doctor_text(const DoctorFacts& facts, bool verbose);

}  // namespace modicum
