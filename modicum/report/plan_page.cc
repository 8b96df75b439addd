// The page of `plan`: the phases of DeepSpeed's forecast or of the requested run, one after
// another, on its fullest node; the verdict, and the inputs.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/owners.h"

namespace modicum {
namespace {

constexpr size_t kMaxPlanTracks = 16;  // of ranks

// A phase as the page shows it: one step along its axis. Not a training step.
struct Step {
  std::string name;
  Phase phase;
};

// The phases of a load. For a job: the phases of its load, then step and save, then the phases of
// its resume and step_resumed. A resume also loads; its load phases get the prefix "resume: ", as
// in "resume: open".
std::vector<Step> steps_of(const StrategyReport& strategy) {
  std::vector<Step> steps;
  if (!strategy.job) {
    for (const Phase& phase : strategy.promise.phases) steps.push_back({phase.name, phase});
    return steps;
  }
  for (const JobPhase& part : phases_of(*strategy.job)) {
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
std::vector<Step> steps_of(const StrategyReport& strategy, const NodeTimeline& line) {
  std::vector<Step> steps;
  for (const std::string_view name : line.phases) {
    const Part part = name == "save"                      ? Part::save
                      : name == "step" || name == "refit" ? Part::step
                                                          : Part::load;
    const Promise promise = part_of(strategy.job->save, part);
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
  std::vector<int> ranks;             // ascending; empty: the launcher
  std::vector<Footprint> footprints;  // sum over the ranks, by phase
  std::string holder;                 // of a timeline; empty: the trainer

  uint64_t most() const {
    uint64_t most = 0;
    for (const Footprint& footprint : footprints) most = std::max(most, footprint.total());
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

void add(Track& to, const std::vector<Footprint>& footprints) {
  for (size_t i = 0; i < footprints.size(); ++i) to.footprints[i] += footprints[i];
}

// The tracks of a node, the largest first, then the launcher's. Beyond kMaxPlanTracks, the
// smallest ones are merged into one.
std::vector<Track> tracks_of(const StrategyReport& strategy, const std::vector<Step>& steps,
                             int node) {
  std::vector<std::pair<std::vector<Footprint>, Track>> distinct;  // one rank's memory, its track
  for (int rank = 0; rank < strategy.promise.ranks(); ++rank) {
    if (!strategy.promise.is_on(node, rank)) continue;
    std::vector<Footprint> footprints;
    for (const Step& step : steps)
      footprints.push_back(step.phase.of_rank[static_cast<size_t>(rank)]);
    auto same = std::find_if(distinct.begin(), distinct.end(),
                             [&](const auto& entry) { return entry.first == footprints; });
    if (same == distinct.end()) {
      distinct.push_back({footprints, {{}, std::vector<Footprint>(steps.size()), {}}});
      same = distinct.end() - 1;
    }
    same->second.ranks.push_back(rank);
    add(same->second, footprints);
  }
  std::vector<Track> tracks;
  for (auto& [_, track] : distinct) tracks.push_back(std::move(track));
  std::stable_sort(tracks.begin(), tracks.end(),
                   [](const Track& a, const Track& b) { return a.most() > b.most(); });
  for (; tracks.size() > kMaxPlanTracks; tracks.pop_back()) {
    Track& last = tracks[tracks.size() - 2];
    add(last, tracks.back().footprints);
    last.ranks.insert(last.ranks.end(), tracks.back().ranks.begin(), tracks.back().ranks.end());
    std::sort(last.ranks.begin(), last.ranks.end());
  }
  Footprint launcher;
  launcher[Purpose::process] = strategy.promise.launcher_bytes;
  tracks.push_back({{}, std::vector<Footprint>(steps.size(), launcher), {}});
  return tracks;
}

// A stacked chart: the bytes of each owner by track and phase.
struct Chart {
  struct Layer {
    std::string_view owner;       // see owners_in_words
    std::vector<uint64_t> bytes;  // by phase
  };
  struct Stack {
    std::string label;
    std::vector<Layer> layers;
  };
  std::vector<std::string> phases;
  std::vector<Stack> stacks;
  int node = 0;

  // The owners in a phase, largest first.
  std::vector<Owner> owners_at(size_t phase) const {
    std::vector<Owner> owners;
    for (const Stack& stack : stacks) {
      for (const Layer& layer : stack.layers) {
        auto same = std::find_if(owners.begin(), owners.end(),
                                 [&](const Owner& owner) { return owner.purpose == layer.owner; });
        if (same == owners.end()) same = owners.insert(same, {std::string(layer.owner), 0});
        same->bytes = saturating_add(same->bytes, layer.bytes[phase]);
      }
    }
    sort_by_bytes(owners);
    return owners;
  }
};

Chart::Stack stack_of(const Track& track) {
  Chart::Stack stack{track.label(), {}};
  for (size_t p = 0; p < static_cast<size_t>(Purpose::count); ++p) {
    const auto purpose = static_cast<Purpose>(p);
    Chart::Layer layer{purpose_name(purpose), {}};
    for (const Footprint& footprint : track.footprints) layer.bytes.push_back(footprint[purpose]);
    const auto is_held = [](uint64_t bytes) { return bytes > 0; };
    if (std::any_of(layer.bytes.begin(), layer.bytes.end(), is_held)) {
      stack.layers.push_back(std::move(layer));
    }
  }
  return stack;
}

// The requested run on a node.
Chart chart_of(const StrategyReport& strategy, int node) {
  const NodeTimeline* const line =
      strategy.timelines.empty() ? nullptr : &strategy.timelines[static_cast<size_t>(node)];
  const std::vector<Step> steps = line == nullptr ? steps_of(strategy) : steps_of(strategy, *line);
  Chart chart{.node = node};
  for (const Step& step : steps) chart.phases.push_back(step.name);
  for (const Track& track : tracks_of(strategy, steps, node))
    chart.stacks.push_back(stack_of(track));
  for (size_t i = 1; line != nullptr && i < line->holders.size(); ++i) {
    const NodeTimeline::Holder& holder = line->holders[i];  // of weights and their page tables
    chart.stacks.push_back(
        {std::string(holder.name), {{purpose_name(Purpose::shards), holder.bytes}}});
  }
  return chart;
}

std::string ranks_text(const DeepSpeedForecast& forecast) {
  return counted(static_cast<uint64_t>(forecast.ranks_of_node), "rank");
}

// The forecast for the largest node: one stack for all ranks.
Chart chart_of(const DeepSpeedForecast& forecast) {
  Chart chart;
  Chart::Stack stack{ranks_text(forecast), {}};
  const std::span<const std::string_view> phases = DeepSpeedForecast::phases();
  chart.phases.assign(phases.begin(), phases.end());
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    auto same =
        std::find_if(stack.layers.begin(), stack.layers.end(),
                     [&](const Chart::Layer& layer) { return layer.owner == line.purpose; });
    if (same == stack.layers.end()) {
      same = stack.layers.insert(same, {line.purpose, std::vector<uint64_t>(phases.size(), 0)});
    }
    bool is_held = false;
    for (size_t i = 0; i < phases.size(); ++i) {
      is_held |= phases[i] == line.phase;
      if (is_held) same->bytes[i] = saturating_add(same->bytes[i], forecast.on_node(line.bytes));
    }
  }
  chart.stacks.push_back(std::move(stack));
  return chart;
}

// Writes a stack with the keys that a track of `watch --json` has. It has neither a pid, a rank nor
// a promise: its pid is 0, the other two are null.
void track_object(JsonWriter& out, const Chart::Stack& stack, int node) {
  out.begin_object().member("label", stack.label).member("pid", 0).member("node", node);
  out.key("rank").null().key("promise_bytes").null().key("owners").begin_object();
  for (const Chart::Layer& layer : stack.layers) {
    out.key(layer.owner).begin_array();
    for (const uint64_t bytes : layer.bytes) out.value(bytes);
    out.end_array();
  }
  out.end_object().end_object();
}

// A document like that of `watch --json`, with the keys `timeline` and `peak`. Its seconds are
// indices of phases.
std::string document_of(const Chart& chart, const std::optional<Budget>& budget) {
  JsonWriter out;
  out.begin_object().key("timeline").begin_object().member("axis", "phases");
  out.key("t_s").begin_array();
  for (size_t i = 0; i < chart.phases.size(); ++i) out.value(i);
  out.end_array().key("limit_bytes").null().key("page_cache_bytes").null();
  std::optional<uint64_t> budget_bytes;
  if (budget) budget_bytes = budget->bytes;
  out.member("budget_bytes", budget_bytes).key("tracks").begin_array();
  for (const Chart::Stack& stack : chart.stacks) track_object(out, stack, chart.node);
  out.end_array().key("phases").begin_array();
  size_t peak = 0;
  uint64_t peak_bytes = 0;
  std::vector<Owner> peak_owners;
  for (size_t i = 0; i < chart.phases.size(); ++i) {
    out.begin_object().member("pid", 0).key("rank").null().member("name", chart.phases[i]);
    out.member("begin_s", i).member("end_s", i + 1).end_object();
    std::vector<Owner> owners = chart.owners_at(i);
    uint64_t sum = 0;
    for (const Owner& owner : owners) sum = saturating_add(sum, owner.bytes);
    if (i > 0 && sum <= peak_bytes) continue;
    peak = i;
    peak_bytes = sum;
    peak_owners = std::move(owners);
  }
  out.end_array().end_object();
  out.key("peak").begin_object().member("at_s", peak).member("bytes", peak_bytes);
  out.member("cause", fmt::format("in phase '{}', mostly {}", chart.phases[peak],
                                  largest_owners(peak_owners, owner_words)));
  return out.end_object().end_object().take();
}

// The bytes of each owner by phase.
PageTable figures_of(const std::string& caption, const Chart& chart) {
  PageTable table{.caption = caption, .head = {"phase", "sum"}};
  std::vector<std::string> owners;
  for (const Owner& owner : chart.owners_at(0)) {  // every phase has the same owners
    owners.push_back(owner.purpose);
    table.head.push_back(owner_words(owner.purpose));
  }
  for (size_t phase = 0; phase < chart.phases.size(); ++phase) {
    std::vector<std::string> row = {chart.phases[phase], ""};
    uint64_t sum = 0;
    const std::vector<Owner> amounts = chart.owners_at(phase);
    for (const std::string& name : owners) {
      const uint64_t bytes = std::ranges::find(amounts, name, &Owner::purpose)->bytes;
      sum = saturating_add(sum, bytes);
      row.push_back(format_size(bytes));
    }
    row[1] = format_size(sum);
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::string verdict_sentence(const PlanReport& report) {
  if (report.past) return past_run_sentence(report);
  const bool has_no_offload = report.deepspeed && !has_forecast(report);  // the answer begins so
  if (!report.budget && !has_no_offload) return "";
  return fmt::format("{}", fmt::join(answers(report), "\n"));
}

int drawn_node(const StrategyReport& strategy) {
  if (!strategy.timelines.empty()) return fullest_timeline(strategy);
  int node = worst_node(strategy.promise);
  for (int other = 0; strategy.job && other < strategy.promise.nodes(); ++other) {
    if (strategy.job->node_peak_bytes(other) > strategy.job->node_peak_bytes(node)) node = other;
  }
  return node;
}

std::vector<PageFact> facts_of(const PlanReport& report, const PageOrigin& origin) {
  std::vector<PageFact> facts = {{"Command", origin.command}};
  facts.insert(facts.end(), report.inputs.begin(), report.inputs.end());
  if (report.budget) {
    facts.push_back({"Budget", fmt::format("{} per node ({})", format_size(report.budget->bytes),
                                           report.budget->source)});
  }
  facts.push_back({"Baseline", report.baseline.is_given
                                   ? fmt::format("{} in each rank process before the load",
                                                 format_size(report.baseline.bytes))
                                   : baseline_clause(report)});
  facts.push_back({"Date", origin.date});
  facts.push_back({"Modicum", origin.version});
  return facts;
}

}  // namespace

std::string plan_page(const PlanReport& report, std::string_view title, const PageOrigin& origin) {
  const StrategyReport& strategy = report.requested();
  const int node = drawn_node(strategy);
  PageText text{.sentence = verdict_sentence(report), .facts = facts_of(report, origin)};
  std::vector<std::pair<std::string, std::string>> runs;  // their labels and documents
  const auto draw = [&](std::string label, const Chart& chart) {
    text.figures.push_back(figures_of(label, chart));
    runs.emplace_back(std::move(label), document_of(chart, report.budget));
  };
  if (has_forecast(report)) {
    const DeepSpeedForecast& forecast = *report.deepspeed;
    if (text.sentence.empty()) text.sentence = deepspeed_sentence(forecast);
    text.tables.push_back(deepspeed_table(forecast));
    draw(fmt::format("DeepSpeed {}, ZeRO-{}, {} on a node, forecast", forecast.version,
                     forecast.stage, ranks_text(forecast)),
         chart_of(forecast));
  }
  if (!has_only_forecast(report)) {
    draw(fmt::format("{}{}, node {} of {}, predicted", runs.empty() ? "" : "Modicum, ",
                     strategy.strategy, node, strategy.promise.nodes()),
         chart_of(strategy, node));
  }
  std::vector<PageRun> drawn;
  for (const auto& [label, document] : runs) drawn.push_back({label, document});
  return report_page(title, drawn, text);
}

}  // namespace modicum
