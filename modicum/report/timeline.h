// The memory of a watched command over time. Internal to `report`.
#pragma once

#include <string>
#include <vector>

#include "modicum/json/json.h"
#include "modicum/watch/watch.h"

namespace modicum {

// One process by sample, or all those together that have no track of their own.
struct TimelineTrack {
  const WatchedProcess* process = nullptr;  // of the record; null: the others
  std::string label;                        // as label_of, or "others"
  std::vector<OwnedMemory> owned;           // by sample

  int pid() const noexcept { return process == nullptr ? 0 : process->pid; }
  bool lives_at(double at_s) const noexcept;
  std::vector<size_t> owners() const;  // those that ever hold something
};

// The 32 processes that held most, ranks in their order first; then the others, if they held
// anything.
std::vector<TimelineTrack> tracks_of(const WatchRecord& record);
// The members `timeline` and `peak` of a run document.
void timeline_members(JsonWriter& out, const WatchRecord& record);
// One sentence: the phase, the process and the owner of the largest part of the peak.
std::string peak_cause(const WatchRecord& record);
// "rank 0"; "pt_data_worker of rank 0" for a process below it, whose environment has the same rank;
// else its name.
std::string label_of(const WatchRecord& record, const WatchedProcess& process);

}  // namespace modicum
