// What `doctor` finds: settings, limits and habits of a program that cost host memory, or end it,
// each with one line of what to do. The findings follow from facts alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "modicum/probe/probe.h"

namespace modicum {

struct DoctorFacts {
  std::vector<MemoryLimit> limits;  // of the process, or of the caller; least available first
  uint64_t oom_kills = 0;
  Settings settings;
  std::optional<Program> program;  // with --pid
  std::optional<uint64_t> budget_bytes;
};

enum class Severity : uint8_t { info, warning, danger };
std::string_view severity_name(Severity severity) noexcept;

struct Finding {
  std::string_view id;
  std::variant<uint64_t, std::string> value;  // bytes, a count, or the name of a setting
  std::optional<uint64_t> limit_bytes;
  std::optional<uint64_t> limit_count;  // of descriptors or mappings
  Severity severity = Severity::info;
  std::string summary;  // one line
  std::string advice;   // one line
};

// Dangers first, then warnings.
std::vector<Finding> findings_of(const DoctorFacts& facts);

std::string doctor_json(const DoctorFacts& facts);
// Advice for dangers and warnings; with `verbose` for every finding.
std::string doctor_text(const DoctorFacts& facts, bool verbose);

}  // namespace modicum
