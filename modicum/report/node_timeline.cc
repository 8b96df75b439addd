// A node of reinforcement learning: the memory of the trainer, and of the other holders (reference
// model, inference engine, backup of the weights).
#include <fmt/format.h>

#include <algorithm>

#include "modicum/report/members.h"

namespace modicum {
namespace {

// Whether the holder has a second copy of the trainer's weights. The reference has other weights:
// the trainer's differ from them after the first step.
bool is_copy(const NodeTimeline::Holder& holder) {
  return holder.name != "trainer" && holder.name != "reference";
}

}  // namespace

uint64_t NodeTimeline::bytes_at(size_t phase) const {
  uint64_t sum = 0;
  for (const Holder& holder : holders) sum += holder.bytes[phase];
  return sum;
}

size_t NodeTimeline::peak_phase() const {
  size_t peak = 0;
  for (size_t i = 1; i < phases.size(); ++i) {
    if (bytes_at(i) > bytes_at(peak)) peak = i;
  }
  return peak;
}

NodeTimeline node_timeline(const JobPromise& job, const NodeFlags& flags, uint64_t engine_bytes,
                           int node) {
  const Promise load = part_of(job.save, Part::load);
  const Promise step = part_of(job.save, Part::step);
  const Promise save = part_of(job.save, Part::save);
  NodeTimeline timeline;
  std::vector<uint64_t> trainer;
  const auto add_phase = [&](std::string_view name, const Promise& load_promise) {
    timeline.phases.push_back(name);
    trainer.push_back(load_promise.node_peak_bytes(node));
  };
  add_phase("load", load);
  // While the reference model loads, the trainer holds its own parameters, and the load of the
  // reference needs as much staging as the trainer's load. Together that is the figure of the
  // trainer's load. The parameters of the reference are added below, as another holder.
  if (flags.reference) add_phase("load_reference", load);
  if (flags.engine_tp > 0) add_phase("start_engine", load);
  add_phase("step", step);
  // "refit": the new weights go to the engine or into the backup.
  if (flags.engine_tp > 0 || flags.backup) add_phase("refit", step);
  add_phase("save", save);
  timeline.holders.push_back({"trainer", std::move(trainer)});

  const auto ranks = static_cast<uint64_t>(
      std::count(load.node_of_rank.begin(), load.node_of_rank.end(), static_cast<uint32_t>(node)));
  const uint64_t shards = load.on_node(node)[Purpose::shards];
  const auto add_holder = [&](std::string_view name, uint64_t held_bytes, std::string_view since) {
    const uint64_t bytes = held_bytes + page_table_bytes(held_bytes);
    std::vector<uint64_t> by_phase(timeline.phases.size(), 0);
    const auto from = std::find(timeline.phases.begin(), timeline.phases.end(), since);
    std::fill(by_phase.begin() + (from - timeline.phases.begin()), by_phase.end(), bytes);
    timeline.holders.push_back({name, std::move(by_phase)});
  };
  if (flags.reference) add_holder("reference", shards, "load_reference");
  if (flags.engine_tp > 0) {
    const auto tp = static_cast<uint64_t>(flags.engine_tp);
    add_holder("engine", saturating_mul((engine_bytes + tp - 1) / tp, ranks), "start_engine");
  }
  if (flags.backup) add_holder("backup", shards, "refit");
  return timeline;
}

int fullest_timeline(const StrategyReport& report) {
  const auto fullest = std::max_element(
      report.timelines.begin(), report.timelines.end(),
      [](const NodeTimeline& a, const NodeTimeline& b) { return a.peak_bytes() < b.peak_bytes(); });
  return static_cast<int>(fullest - report.timelines.begin());
}

std::optional<Error> refusal_of_timelines(const PlanReport& report) {
  const StrategyReport& strategy = report.requested();
  const int node = fullest_timeline(strategy);
  const NodeTimeline& line = strategy.timelines[static_cast<size_t>(node)];
  const size_t phase = line.peak_phase();
  std::vector<Owner> owners;
  for (const NodeTimeline::Holder& holder : line.holders) {
    if (holder.bytes[phase] > 0) owners.push_back({std::string(holder.name), holder.bytes[phase]});
  }
  sort_by_bytes(owners);
  return refusal_of({.who = fmt::format("node {}", node),
                     .bytes = line.bytes_at(phase),
                     .when = fmt::format("in phase '{}'", line.phases[phase]),
                     .owners = std::move(owners)},
                    *report.budget);
}

void timeline_member(JsonWriter& out, const NodeTimeline& timeline) {
  out.key("rl").begin_object().member("peak_bytes", timeline.peak_bytes());
  out.member("peak_phase", timeline.phases[timeline.peak_phase()]).key("phases").begin_array();
  for (size_t i = 0; i < timeline.phases.size(); ++i) {
    out.begin_object().member("phase", timeline.phases[i]).member("bytes", timeline.bytes_at(i));
    out.key("by_holder").begin_object();
    for (const auto& holder : timeline.holders) {
      if (holder.bytes[i] > 0) out.member(holder.name, holder.bytes[i]);
    }
    out.end_object().end_object();
  }
  out.end_array().key("held_twice").begin_array();
  for (const auto& holder : timeline.holders) {
    if (!is_copy(holder)) continue;
    out.begin_object().member("holder", holder.name).member("copy_of", "trainer");
    out.member("bytes", holder.bytes.back()).end_object();
  }
  out.end_array().end_object();
}

std::string timeline_text(const PlanReport& report) {
  const StrategyReport& strategy = report.requested();
  if (strategy.timelines.empty()) return "";
  const int node = fullest_timeline(strategy);
  const NodeTimeline& line = strategy.timelines[static_cast<size_t>(node)];
  std::string text =
      fmt::format("\n{}, node {} by holder and phase\n{:<10}", strategy.strategy, node, "");
  for (const std::string_view phase : line.phases) text += fmt::format(" {:>14}", phase);
  for (const auto& holder : line.holders) {
    text += fmt::format("\n{:<10}", holder.name);
    for (const uint64_t bytes : holder.bytes) text += fmt::format(" {:>14}", format_size(bytes));
  }
  text += fmt::format("\n{:<10}", "sum");
  for (size_t i = 0; i < line.phases.size(); ++i) {
    text += fmt::format(" {:>14}", format_size(line.bytes_at(i)));
  }
  text += "\n";
  for (const auto& holder : line.holders) {
    if (!is_copy(holder)) continue;
    text += fmt::format("held twice: {} by trainer and {}\n", format_size(holder.bytes.back()),
                        holder.name);
  }
  return text;
}

}  // namespace modicum
