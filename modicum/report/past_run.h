// The peak and the limit of an earlier run, for `plan --from`. Part of the public header of
// `report`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace modicum {

struct PastRun {
  std::string file;                     // base name of its document
  uint64_t held_bytes = 0;              // its peak; the promised one if it was refused
  std::optional<uint64_t> limit_bytes;  // on its memory per node
  bool is_refused = false;              // it failed with BUDGET before it began
  std::string killed;                   // the process that the kernel killed; empty: none
};

// Parses a document that `watch --json` printed, or the JSON error BUDGET of a run. Throws USAGE
// with the file for any other text.
PastRun read_past_run(std::string_view text, const std::string& file);

}  // namespace modicum
