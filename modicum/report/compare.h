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
  uint64_t at_most_bytes = 0;  // the peak, or more if `watch` may have missed more
  std::string peak_cause;
  int64_t exit_code = 0;                   // of the command
  std::map<std::string, uint64_t> owners;  // each owner's sum over all processes, at the peak
  // The highest sum over all processes and owners while any process was in the phase.
  std::map<std::string, uint64_t> phases;
  bool has_reports = false;  // a process of it reported purposes; otherwise its owners are kinds
};
// `text`: a document that `watch --json` prints. Throws FORMAT.JSON, FORMAT.UTF8, FORMAT.DUP or,
// for a JSON document of another kind, FORMAT.SCHEMA, with `name` as the file.
WatchedRun parse_run(std::string_view text, const std::string& name);

struct RunComparison {
  WatchedRun a, b;

  // Whether both runs divide memory in the same way: by purposes and kinds, or by kinds alone.
  bool has_comparable_owners() const noexcept { return a.has_reports == b.has_reports; }
  // Whether the lower peak is below the other one, or equal peaks are equal, even if `watch` has
  // missed as much of them as it may have.
  bool is_certain() const noexcept;
  // The owner whose bytes at the two peaks differ most. A run without the owner counts as 0 bytes.
  // Empty if no owner differs, owners aren't comparable, or it isn't certain which peak is higher.
  std::string owner() const;
  // The phase whose bytes differ most, among the phases that both runs have. Empty if no phase
  // differs, or it isn't certain which peak is higher.
  std::string phase() const;
  std::string sentence() const;

 private:
  std::string compared_peaks() const;
};
std::string comparison_json(const RunComparison& comparison);
std::string comparison_text(const RunComparison& comparison);

}  // namespace modicum
