// The page of `plan`: the phases of the requested run, one after another, on its fullest node.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/owners.h"

namespace modicum {
namespace {

constexpr size_t kMostTracks = 16;  // of ranks

// A phase as the page shows it: one step along its axis. Not a training step.
struct Step {
  std::string name;
  Phase phase;
};

// The phases of a load. For a job: the phases of its load, then step and save, then the phases of
// its resume and step_resumed. A resume also loads; its load phases get the prefix "resume: ", as
// in "resume: open".
std::vector<Step> steps_of(const StrategyReport& of) {
  std::vector<Step> steps;
  if (!of.job) {
    for (const Phase& phase : of.promise.phases) steps.push_back({phase.name, phase});
    return steps;
  }
  for (const JobPhase& part : phases_of(*of.job)) {
    const bool is_resume = part.name == "resume";
    for (const Phase& phase : part.promise.phases) {
      const bool is_inner = is_resume && phase.name != part.name;
      steps.push_back({is_inner              ? fmt::format("resume: {}", phase.name)
                       : part.name == "load" ? phase.name
                                             : std::string(part.name),
                       phase});
    }
  }
  return steps;
}

// The phases of a timeline, with each rank at its own peak.
std::vector<Step> steps_of(const StrategyReport& of, const NodeTimeline& line) {
  std::vector<Step> steps;
  for (const std::string_view name : line.phases) {
    const Part part = name == "save"                      ? Part::save
                      : name == "step" || name == "refit" ? Part::step
                                                          : Part::load;
    const Promise promise = part_of(of.job->save, part);
    Phase phase{std::string(name), {}};
    for (int rank = 0; rank < promise.ranks(); ++rank) {
      phase.of_rank.push_back(promise.peak_phase(rank).of_rank[static_cast<size_t>(rank)]);
    }
    steps.push_back({phase.name, std::move(phase)});
  }
  return steps;
}

// Ranks of one node that hold equal memory in every phase; for the smallest tracks see tracks_of.
struct Track {
  std::vector<int> ranks;       // ascending; empty: the launcher
  std::vector<Footprint> held;  // sum over the ranks, by phase
  std::string holder;           // of a timeline; empty: the trainer

  uint64_t most() const {
    uint64_t most = 0;
    for (const Footprint& of : held) most = std::max(most, of.total());
    return most;
  }
  std::string label() const {
    if (!holder.empty()) return holder;
    if (ranks.empty()) return "launcher";
    if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
    const bool is_row = ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
    return is_row
               ? fmt::format("ranks {} to {} ({} ranks)", ranks.front(), ranks.back(), ranks.size())
               : fmt::format("rank {} and {} more", ranks.front(), ranks.size() - 1);
  }
};

void add(Track& to, const std::vector<Footprint>& held) {
  for (size_t i = 0; i < held.size(); ++i) to.held[i] += held[i];
}

// The tracks of a node, the largest first, then the launcher's. Beyond kMostTracks, the smallest
// ones are merged into one.
std::vector<Track> tracks_of(const StrategyReport& of, const std::vector<Step>& steps, int node) {
  std::vector<std::pair<std::vector<Footprint>, Track>> distinct;  // one rank's memory, its track
  for (int rank = 0; rank < of.promise.ranks(); ++rank) {
    if (!of.promise.is_on(node, rank)) continue;
    std::vector<Footprint> held;
    for (const Step& step : steps) held.push_back(step.phase.of_rank[static_cast<size_t>(rank)]);
    auto same = std::find_if(distinct.begin(), distinct.end(),
                             [&](const auto& one) { return one.first == held; });
    if (same == distinct.end()) {
      distinct.push_back({held, {{}, std::vector<Footprint>(steps.size()), {}}});
      same = distinct.end() - 1;
    }
    same->second.ranks.push_back(rank);
    add(same->second, held);
  }
  std::vector<Track> tracks;
  for (auto& [_, track] : distinct) tracks.push_back(std::move(track));
  std::stable_sort(tracks.begin(), tracks.end(),
                   [](const Track& a, const Track& b) { return a.most() > b.most(); });
  for (; tracks.size() > kMostTracks; tracks.pop_back()) {
    Track& last = tracks[tracks.size() - 2];
    add(last, tracks.back().held);
    last.ranks.insert(last.ranks.end(), tracks.back().ranks.begin(), tracks.back().ranks.end());
    std::sort(last.ranks.begin(), last.ranks.end());
  }
  Footprint launcher;
  launcher[Purpose::process] = of.promise.launcher_bytes;
  tracks.push_back({{}, std::vector<Footprint>(steps.size(), launcher), {}});
  return tracks;
}

// Writes a track with the keys that a track of `watch --json` has. A track of a plan has neither a
// pid, a rank nor a promise: its pid is 0, the other two are null.
void track_object(JsonWriter& out, const Track& track, int node) {
  out.begin_object().member("label", track.label()).member("pid", 0).member("node", node);
  out.key("rank").null().key("promise_bytes").null().key("owners").begin_object();
  for (size_t p = 0; p < static_cast<size_t>(Purpose::count); ++p) {
    const auto purpose = static_cast<Purpose>(p);
    const auto holds = [&](const Footprint& of) { return of[purpose] > 0; };
    if (std::none_of(track.held.begin(), track.held.end(), holds)) continue;
    out.key(purpose_name(purpose)).begin_array();
    for (const Footprint& of : track.held) out.value(of[purpose]);
    out.end_array();
  }
  out.end_object().end_object();
}

// The requested run as a document like that of `watch --json`, with the keys `timeline` and `peak`.
// Its seconds are indices of phases.
std::string document_of(const PlanReport& report, const StrategyReport& of, int node) {
  const NodeTimeline* const line =
      of.timelines.empty() ? nullptr : &of.timelines[static_cast<size_t>(node)];
  const std::vector<Step> steps = line == nullptr ? steps_of(of) : steps_of(of, *line);
  std::vector<Track> tracks = tracks_of(of, steps, node);
  for (size_t i = 1; line != nullptr && i < line->holders.size(); ++i) {
    Track track{.ranks = {}, .held = {}, .holder = std::string(line->holders[i].name)};
    for (const uint64_t bytes : line->holders[i].bytes) {
      track.held.emplace_back()[Purpose::shards] = bytes;  // weights and their page tables
    }
    tracks.push_back(std::move(track));
  }
  JsonWriter out;
  out.begin_object().key("timeline").begin_object().member("axis", "phases");
  out.key("t_s").begin_array();
  for (size_t i = 0; i < steps.size(); ++i) out.value(i);
  out.end_array().key("limit_bytes").null().key("page_cache_bytes").null();
  std::optional<uint64_t> budget;
  if (report.budget) budget = report.budget->bytes;
  out.member("budget_bytes", budget).key("tracks").begin_array();
  for (const Track& track : tracks) track_object(out, track, node);
  out.end_array().key("phases").begin_array();
  std::vector<Footprint> sums(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const Track& track : tracks) sums[i] += track.held[i];
    out.begin_object().member("pid", 0).key("rank").null().member("name", steps[i].name);
    out.member("begin_s", i).member("end_s", i + 1).end_object();
  }
  out.end_array().end_object();
  const auto peak = std::max_element(
      sums.begin(), sums.end(),
      [](const Footprint& a, const Footprint& b) { return a.total() < b.total(); });
  const auto at = static_cast<size_t>(peak - sums.begin());
  out.key("peak").begin_object().member("at_s", at).member("bytes", peak->total());
  out.member("cause", fmt::format("in phase '{}', mostly {}", steps[at].name,
                                  largest_owners(owners_of(*peak), owner_words)));
  return out.end_object().end_object().text();
}

std::string sentence_of(const PlanReport& report) {
  if (report.past) return past_run_sentence(report);
  if (!report.budget) return "";
  std::string sentence;
  for (const char c : verdict_text(report))
    sentence += c == '\n' ? std::string("; ") : std::string(1, c);
  // verdict_text begins and ends with a newline; this drops the "; " that each of them became.
  return sentence.substr(2, sentence.size() - 4);
}

}  // namespace

std::string plan_page(const PlanReport& report, std::string_view title) {
  const StrategyReport& of = report.requested();
  int node = worst_node(of.promise);
  for (int other = 0; of.job && other < of.promise.nodes(); ++other) {
    if (of.job->node_peak_bytes(other) > of.job->node_peak_bytes(node)) node = other;
  }
  if (!of.timelines.empty()) node = fullest_timeline(of);
  const std::string label =
      fmt::format("{}, node {} of {}, predicted", of.strategy, node, of.promise.nodes());
  const std::string document = document_of(report, of, node);
  const PageRun run{label, document};
  return report_page(title, std::span(&run, 1), sentence_of(report));
}

}  // namespace modicum
