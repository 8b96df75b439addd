// Compares two run documents of `watch`. Part of the public header of `report`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace modicum {

// The figures of one run that are compared. All amounts are bytes.
struct WatchedRun {
  std::string name;  // file name of the document
  uint64_t peak_bytes = 0;
  std::string peak_cause;
  std::map<std::string, uint64_t> owners;  // each owner's sum over all processes, at the peak
  // The highest sum over all processes and owners while any process was in the phase.
  std::map<std::string, uint64_t> phases;
};
// `text`: a document that `watch --json` prints. Throws FORMAT.JSON, FORMAT.UTF8, FORMAT.DUP or,
// for a JSON document of another kind, FORMAT.SCHEMA, with `name` as the file.
WatchedRun parse_run(std::string_view text, const std::string& name);

struct RunComparison {
  WatchedRun a, b;

  // The owner whose bytes at the two peaks differ most. A run without the owner counts as 0 bytes.
  // Empty if no owner differs.
  std::string owner() const;
  // The phase whose bytes differ most, among the phases that both runs have. Empty if no phase
  // differs.
  std::string phase() const;
  std::string sentence() const;
};
std::string comparison_json(const RunComparison& comparison);
std::string comparison_text(const RunComparison& comparison);

}  // namespace modicum
