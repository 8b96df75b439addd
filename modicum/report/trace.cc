// The record of a watched command in the Trace Event Format, which Perfetto and Chrome open.
#include <cmath>

#include "modicum/json/json.h"
#include "modicum/report/report.h"
#include "modicum/report/timeline.h"

namespace modicum {
namespace {

constexpr int kAllProcesses = 0;  // the pid of events for the whole tree

int64_t microseconds(double seconds) noexcept { return std::llround(seconds * 1e6); }

JsonWriter& begin_event(JsonWriter& out, const char* type, std::string_view name, int pid) {
  out.begin_object().member("ph", type).member("name", name);
  return out.member("pid", pid).member("tid", pid);
}

void name_process(JsonWriter& out, int pid, const std::string& name) {
  begin_event(out, "M", "process_name", pid).key("args").begin_object();
  out.member("name", name).end_object().end_object();
}

// Writes a counter event of a track; zeros if `owned` is null.
void counter(JsonWriter& out, const TimelineTrack& track, double at_s, const OwnedMemory* owned) {
  begin_event(out, "C", "memory", track.pid()).member("ts", microseconds(at_s));
  out.key("args").begin_object();
  for (const size_t owner : track.owners()) {
    out.member(watch_owner_name(owner), owned == nullptr ? 0 : owned->bytes(owner));
  }
  out.end_object().end_object();
}

void counters(JsonWriter& out, const WatchRecord& record, const TimelineTrack& track) {
  bool lived = false;
  for (size_t s = 0; s < track.owned.size(); ++s) {
    const double at_s = record.samples[s].at_s;
    const bool lives = track.lives_at(at_s);
    if (!lives && !lived) continue;
    lived = lives;  // the first sample after its end becomes an event with zeros
    counter(out, track, at_s, lives ? &track.owned[s] : nullptr);
  }
  if (lived) counter(out, track, record.elapsed_s, nullptr);
}

void counters_of_all(JsonWriter& out, const WatchRecord& record) {
  name_process(out, kAllProcesses, "all processes");
  for (const WatchSample& sample : record.samples) {
    begin_event(out, "C", "held", kAllProcesses).member("ts", microseconds(sample.at_s));
    out.key("args").begin_object().member("bytes", sample.held_bytes).end_object().end_object();
    begin_event(out, "C", "page cache", kAllProcesses).member("ts", microseconds(sample.at_s));
    out.key("args").begin_object().member("bytes", sample.page_cache_bytes);
    out.end_object().end_object();
  }
}

}  // namespace

std::string watch_trace(const WatchRecord& record) {
  JsonWriter out;
  out.begin_object().member("displayTimeUnit", "ms").key("traceEvents").begin_array();
  counters_of_all(out, record);
  for (const TimelineTrack& track : tracks_of(record)) {
    if (track.process != nullptr) name_process(out, track.pid(), track.label);
    counters(out, record, track);
  }
  for (const WatchedPhase& phase : record.phases) {
    begin_event(out, "X", phase.name, phase.pid).member("cat", "phase");
    out.member("ts", microseconds(phase.begin_s));
    out.member("dur", microseconds(phase.end_s) - microseconds(phase.begin_s)).end_object();
  }
  begin_event(out, "i", "peak", kAllProcesses).member("s", "g");
  out.member("ts", microseconds(record.peak_at_s)).key("args").begin_object();
  out.member("cause", peak_cause(record)).end_object().end_object();
  return out.end_array().end_object().text();
}

}  // namespace modicum
