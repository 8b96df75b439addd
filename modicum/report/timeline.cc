#include "modicum/report/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "modicum/report/owners.h"
#include "modicum/report/report.h"

namespace modicum {
namespace {

constexpr size_t kMaxTracks = 32;

double rounded(double seconds) noexcept { return std::round(seconds * 1e4) / 1e4; }

// The processes that get a track, as indices in record.processes: those that held most.
std::vector<uint32_t> tracked(const WatchRecord& record) {
  std::map<uint32_t, uint64_t> most;
  for (const WatchSample& sample : record.samples) {
    for (const WatchSample::Share& share : sample.shares) {
      uint64_t& process_bytes = most[share.process];
      process_bytes = std::max(process_bytes, share.bytes);
    }
  }
  std::vector<uint32_t> processes;
  for (const auto& [process, process_bytes] : most) processes.push_back(process);
  std::stable_sort(processes.begin(), processes.end(),
                   [&](uint32_t a, uint32_t b) { return most[a] > most[b]; });
  if (processes.size() > kMaxTracks) processes.resize(kMaxTracks);
  // Sorts by rank. Processes without a rank come last, in the order in which they began.
  std::sort(processes.begin(), processes.end(), [&](uint32_t a, uint32_t b) {
    const auto place = [&](uint32_t process) {
      return std::pair(record.processes[process].rank.value_or(INT32_MAX), process);
    };
    return place(a) < place(b);
  });
  return processes;
}

void owners_member(JsonWriter& out, const WatchRecord& record, const TimelineTrack& track) {
  out.key("owners").begin_object();
  for (const size_t owner : track.owners()) {
    out.key(watch_owner_name(owner)).begin_array();
    for (size_t s = 0; s < track.owned.size(); ++s) {
      if (track.lives_at(record.samples[s].at_s)) {
        out.value(track.owned[s].bytes(owner));
      } else {
        out.null();
      }
    }
    out.end_array();
  }
  out.end_object();
}

// The promise at each sample. If several phases with a promise include the sample, the one that
// began last is the innermost, and its promise counts.
void promise_member(JsonWriter& out, const WatchRecord& record, const TimelineTrack& track) {
  std::vector<std::optional<uint64_t>> promised(record.samples.size());
  bool is_any = false;
  for (const WatchedPhase& phase : record.phases) {
    if (phase.pid != track.pid() || !phase.promised_bytes) continue;
    for (size_t s = 0; s < promised.size(); ++s) {
      const double at_s = record.samples[s].at_s;
      if (!phase.has(at_s) || !track.lives_at(at_s)) continue;
      promised[s] = phase.promised_bytes;
      is_any = true;
    }
  }
  out.key("promise_bytes");
  if (!is_any) {
    out.null();
    return;
  }
  out.begin_array();
  for (const auto& bytes : promised) out.value(bytes);
  out.end_array();
}

void tracks_member(JsonWriter& out, const WatchRecord& record) {
  out.key("tracks").begin_array();
  for (const TimelineTrack& track : tracks_of(record)) {
    const bool is_ranked = track.process != nullptr && track.process->rank;
    out.begin_object().member("label", track.label).member("pid", track.pid());
    out.member("rank", is_ranked ? track.process->rank : std::nullopt).member("node", 0);
    owners_member(out, record, track);
    promise_member(out, record, track);
    out.end_object();
  }
  out.end_array();
}

void phases_member(JsonWriter& out, const WatchRecord& record) {
  out.key("phases").begin_array();
  for (const WatchedPhase& phase : record.phases) {
    out.begin_object().member("pid", phase.pid).member("rank", phase.rank);
    out.member("name", phase.name).member("begin_s", rounded(phase.begin_s));
    out.member("end_s", rounded(phase.end_s)).end_object();
  }
  out.end_array();
}

}  // namespace

bool TimelineTrack::lives_at(double at_s) const noexcept {
  return process == nullptr || (process->begin_s <= at_s && at_s <= process->end_s);
}

std::vector<size_t> TimelineTrack::owners() const {
  std::vector<size_t> used;
  for (size_t owner = 0; owner < kWatchOwners; ++owner) {
    const auto has = [owner](const OwnedMemory& memory) { return memory.kib[owner] > 0; };
    if (std::any_of(owned.begin(), owned.end(), has)) used.push_back(owner);
  }
  return used;
}

std::vector<TimelineTrack> tracks_of(const WatchRecord& record) {
  const std::vector<uint32_t> processes = tracked(record);
  std::map<uint32_t, size_t> track_of;
  std::vector<TimelineTrack> tracks;
  for (const uint32_t process : processes) {
    track_of[process] = tracks.size();
    const WatchedProcess& watched = record.processes[process];
    tracks.push_back({.process = &watched, .label = label_of(record, watched)});
  }
  tracks.push_back({.label = "others"});
  for (TimelineTrack& track : tracks) track.owned.resize(record.samples.size());
  for (size_t s = 0; s < record.samples.size(); ++s) {
    for (const WatchSample::Share& share : record.samples[s].shares) {
      const auto at = track_of.find(share.process);
      tracks[at == track_of.end() ? processes.size() : at->second].owned[s] += share.owned;
    }
    tracks.back().owned[s] += record.samples[s].others;
  }
  if (tracks.back().owners().empty()) tracks.pop_back();
  return tracks;
}

std::string label_of(const WatchRecord& record, const WatchedProcess& process) {
  if (!process.rank) return printable(process.name);
  // If the parent has the same variable and rank, the process inherited them.
  const auto gave_it = [&](const WatchedProcess& candidate) {
    return candidate.pid == process.parent && candidate.rank == process.rank &&
           candidate.rank_variable == process.rank_variable && candidate.end_s >= process.begin_s;
  };
  const bool is_below = !process.rank_variable.empty() &&
                        std::any_of(record.processes.begin(), record.processes.end(), gave_it);
  return is_below ? fmt::format("{} of rank {}", printable(process.name), *process.rank)
                  : fmt::format("rank {}", *process.rank);
}

namespace {

std::string cause_of(const WatchRecord& record) {
  const WatchSample* const peak = record.peak();
  if (peak == nullptr || peak->shares.empty()) return "no process held memory";
  const WatchSample::Share& most = peak->shares.front();
  const WatchedProcess& process = record.processes[most.process];
  std::string text;
  if (const WatchedPhase* const phase = record.phase_at(process.pid, peak->at_s)) {
    text = fmt::format("during `{}`, ", phase->name);
  } else if (const WatchedPhase* const last = record.phase_before(process.pid, peak->at_s)) {
    text = fmt::format("after `{}`, ", last->name);
  }
  text += fmt::format("{} (pid {}) held {}", label_of(record, process), process.pid,
                      format_size(most.bytes));
  const size_t owner = most.owned.grown_since({});  // from 0 bytes, so the largest owner
  if (owner == static_cast<size_t>(WatchOwner::unattributed)) return text;
  return text + fmt::format(", of which {} {}", owner_words(watch_owner_name(owner)),
                            format_size(most.owned.bytes(owner)));
}

}  // namespace

std::string peak_cause(const WatchRecord& record) {
  if (!record.may_have_missed_peak()) return cause_of(record);
  const bool is_by_copies = record.is_at_most_by_copies;
  return fmt::format(
      "{}; {} the peak may have been higher, at most {} ({})", cause_of(record),
      is_by_copies ? "with copies of pages shared since a fork" : "between two samples",
      format_size(record.peak_at_most_bytes),
      is_by_copies ? "page faults; exact with --limit" : "VmHWM");
}

void timeline_members(JsonWriter& out, const WatchRecord& record) {
  out.key("timeline").begin_object().key("t_s").begin_array();
  for (const WatchSample& sample : record.samples) out.value(rounded(sample.at_s));
  out.end_array();
  out.member("limit_bytes", record.limit_bytes ? record.limit_bytes : record.group_limit_bytes);
  out.member("budget_bytes", record.budget_bytes).key("page_cache_bytes").begin_array();
  for (const WatchSample& sample : record.samples) out.value(sample.page_cache_bytes);
  out.end_array();
  tracks_member(out, record);
  phases_member(out, record);
  out.end_object().key("peak").begin_object().member("at_s", rounded(record.peak_at_s));
  out.member("bytes", record.peak_bytes).member("at_most_bytes", record.peak_at_most_bytes);
  out.member("cause", peak_cause(record)).end_object();
}

}  // namespace modicum
