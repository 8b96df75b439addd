// What grows in a watched command, and what to do about it. Internal to `report`.
#pragma once

#include <optional>
#include <string>

#include "modicum/watch/watch.h"

namespace modicum {

// The steady growth of one process until it held most.
struct WatchGrowth {
  const WatchedProcess* process = nullptr;  // in the record
  size_t owner = 0;                         // the owner of its memory that grew most
  double bytes_per_s = 0;                   // of all its memory
  double owner_bytes_per_s = 0;
  double seconds = 0;  // for which it grew so
};

// The process that grew most over the second half of the time until it held most. nullopt if it
// held most long before its end, or if none grew steadily (a line explains most of its changes) by
// at least 16 MiB and 1/32 of what it held.
std::optional<WatchGrowth> growth_in(const WatchRecord& record);

// What to check next if memory of this owner grows. Empty for owners that a ledger reports.
std::string next_step(size_t owner, int pid);

}  // namespace modicum
