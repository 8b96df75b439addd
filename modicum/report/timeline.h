// The memory of a watched command over time. Internal to `report`.
#pragma once

#include <string>
#include <vector>

#include "modicum/json/json.h"
#include "modicum/watch/watch.h"

namespace modicum {

// The memory of one process by sample, or the sum of all processes without a track.
struct TimelineTrack {
  const WatchedProcess* process = nullptr;  // in the record; null: all processes without a track
  std::string label;                        // as label_of, or "others"
  std::vector<OwnedMemory> owned;           // by sample

  int pid() const noexcept { return process == nullptr ? 0 : process->pid; }
  bool lives_at(double at_s) const noexcept;
  std::vector<size_t> owners() const;  // those that ever hold memory
};

// The tracks of the 32 processes that held most, sorted by rank; processes without a rank come
// last. Then the track "others", if processes without a track held memory.
std::vector<TimelineTrack> tracks_of(const WatchRecord& record);
// Writes the members `timeline` and `peak` of a run document.
void timeline_members(JsonWriter& out, const WatchRecord& record);
// One sentence: the phase, the process and the owner of the largest part of the peak.
std::string peak_cause(const WatchRecord& record);
// "rank 0"; "pt_data_worker of rank 0" for a child that inherited its parent's rank; the process's
// name if it has no rank.
std::string label_of(const WatchRecord& record, const WatchedProcess& process);

}  // namespace modicum
