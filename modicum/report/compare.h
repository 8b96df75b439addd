// Two run documents of `watch`, compared. Part of the door of `report`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace modicum {

// What a comparison needs of a run document. Bytes.
struct WatchedRun {
  std::string name;  // of the file
  uint64_t peak_bytes = 0;
  std::string peak_cause;
  std::map<std::string, uint64_t> owners;  // over all processes, at the peak
  std::map<std::string, uint64_t> phases;  // the most that all processes held while one was in it
};
// `text`: a document that `watch --json` prints. FORMAT.JSON, FORMAT.SCHEMA (as for every other
// JSON document), FORMAT.UTF8 or FORMAT.DUP, naming `name`.
WatchedRun parse_run(std::string_view text, const std::string& name);

struct RunComparison {
  WatchedRun a, b;

  // The owner and the phase whose bytes differ most, and that both, or one of them, have. Empty:
  // none differs. Of the phases only those that both have.
  std::string owner() const;
  std::string phase() const;
  std::string sentence() const;
};
std::string comparison_json(const RunComparison& of);
std::string comparison_text(const RunComparison& of);

}  // namespace modicum
