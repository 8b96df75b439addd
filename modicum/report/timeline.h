// The memory of a watched command over time. Internal to `report`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "modicum/json/json.h"
#include "modicum/watch/watch.h"

namespace modicum {

// One process by sample, or all those together that have no track of their own.
struct TimelineTrack {
  const WatchedProcess* process = nullptr;  // of the record; null: the others
  std::vector<OwnedMemory> owned;           // by sample

  int pid() const noexcept { return process == nullptr ? 0 : process->pid; }
  std::string label() const;
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
// "rank 0", or its name.
std::string label_of(const WatchedProcess& process);
// "copies since a fork" for "copies_since_fork".
std::string owner_words(std::string_view owner);

}  // namespace modicum
