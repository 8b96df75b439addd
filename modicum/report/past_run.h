// An earlier run, and what it held against its limit: for `plan --from`. Part of the door of
// `report`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace modicum {

struct PastRun {
  std::string file;                     // base name of its document
  uint64_t held_bytes = 0;              // at its peak; if refused, what it would have held
  std::optional<uint64_t> limit_bytes;  // of the node
  bool is_refused = false;              // BUDGET, before it began
  std::string killed;                   // the process that the kernel killed; empty: none
};

// Reads what `watch --json` printed, or the error of a run that was refused for its budget. USAGE,
// naming the file, for anything else.
PastRun read_past_run(std::string_view text, const std::string& file);

}  // namespace modicum
