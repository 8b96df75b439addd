// The forecast of DeepSpeed's memory, next to that of Modicum.
#include <fmt/format.h>

#include <array>

#include "modicum/report/members.h"

namespace modicum {
namespace {

// In order: memory that is allocated in a phase is held in all later ones.
constexpr std::array<std::string_view, 3> kPhases = {"init", "step_1", "epoch_2"};
constexpr std::array<std::string_view, 4> kForecastOwners = {"deepspeed", "fork", "pinned rounding",
                                                             "process"};

}  // namespace

uint64_t DeepSpeedForecast::bytes_at(std::string_view phase) const noexcept {
  uint64_t sum = 0;
  for (const std::string_view each : kPhases) {
    for (const Line& line : lines) sum += line.phase == each ? line.bytes : 0;
    if (each == phase) break;
  }
  return sum;
}

uint64_t DeepSpeedForecast::bytes_of(std::string_view owner) const noexcept {
  uint64_t sum = 0;
  for (const Line& line : lines) sum += line.owner == owner ? line.bytes : 0;
  return sum;
}

std::span<const std::string_view> DeepSpeedForecast::phases() noexcept { return kPhases; }

uint64_t DeepSpeedForecast::peak_bytes() const noexcept { return bytes_at(kPhases.back()); }

uint64_t DeepSpeedForecast::on_node(uint64_t bytes) const noexcept {
  return saturating_mul(bytes, static_cast<uint64_t>(ranks_of_node));
}

std::optional<Error> refusal_of_deepspeed(const PlanReport& report) {
  const DeepSpeedForecast& of = *report.deepspeed;
  std::vector<Owner> owners;
  for (const std::string_view owner : kForecastOwners) {
    const uint64_t bytes = of.on_node(of.bytes_of(owner));
    if (bytes > 0) owners.push_back({std::string(owner), bytes});
  }
  sort_by_bytes(owners);
  return refusal_of({.who = "DeepSpeed",
                     .bytes = of.on_node(of.peak_bytes()),
                     .when = fmt::format("on a node by {}", kPhases.back()),
                     .owners = std::move(owners)},
                    *report.budget);
}

double DeepSpeedForecast::per_param(uint64_t bytes) const noexcept {
  return params_of_rank == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(params_of_rank);
}

void deepspeed_member(JsonWriter& out, const DeepSpeedForecast& of) {
  const auto amount = [&](uint64_t bytes) {
    out.member("bytes_per_param", of.per_param(bytes)).member("rank_bytes", bytes);
    out.member("node_bytes", of.on_node(bytes)).end_object();
  };
  out.key("deepspeed").begin_object().member("version", of.version).member("stage", of.stage);
  out.member("params", of.params).member("params_of_rank", of.params_of_rank);
  out.member("ranks_of_node", of.ranks_of_node).key("lines").begin_array();
  for (const DeepSpeedForecast::Line& line : of.lines) {
    out.begin_object().member("name", line.name).member("owner", line.owner);
    out.member("phase", line.phase).member("bytes_per_param", line.bytes_per_param);
    out.member("bytes", line.bytes).end_object();
  }
  out.end_array().key("totals").begin_object();
  for (const std::string_view phase : kPhases) {
    out.key(phase).begin_object();
    amount(of.bytes_at(phase));
  }
  out.end_object().key("by_owner").begin_object();
  for (const std::string_view owner : kForecastOwners) {
    out.key(owner).begin_object();
    amount(of.bytes_of(owner));
  }
  out.end_object().key("ours").begin_array();
  for (const DeepSpeedForecast::Ours& ours : of.ours) {
    out.begin_object().member("state_format", row_of(ours.format).name);
    amount(ours.bytes);
  }
  out.end_array().end_object();
}

std::string deepspeed_text(const DeepSpeedForecast& of) {
  std::string text = fmt::format(
      "\nDeepSpeed {}, ZeRO stage {}: host memory of a rank that keeps {} of {} parameters\n\n",
      of.version, of.stage, of.params_of_rank, of.params);
  text += fmt::format("{:<9} {:<16} {:>12} {:>10}  {}\n", "taken at", "owner", "bytes", "per param",
                      "what");
  for (const DeepSpeedForecast::Line& line : of.lines) {
    text += fmt::format("{:<9} {:<16} {:>12} {:>10.2f}  {}\n", line.phase, line.owner,
                        format_size(line.bytes), line.bytes_per_param, line.name);
  }
  const auto total = [&](std::string_view what, uint64_t bytes) {
    text += fmt::format("{:<26} {:>12} {:>10.2f}  per node: {}\n", what, format_size(bytes),
                        of.per_param(bytes), format_size(of.on_node(bytes)));
  };
  text += '\n';
  for (const std::string_view phase : kPhases) total(phase, of.bytes_at(phase));
  text += "\nModicum's optimizer state by format, held from the beginning\n";
  for (const DeepSpeedForecast::Ours& ours : of.ours) total(row_of(ours.format).name, ours.bytes);
  return text;
}

std::string deepspeed_sentence(const DeepSpeedForecast& of) {
  std::string text = fmt::format("DeepSpeed {}, ZeRO-{}, needs", of.version, of.stage);
  for (const std::string_view phase : kPhases) {
    text += fmt::format("{} {} by {}", phase == kPhases.front() ? "" : ",",
                        format_size(of.on_node(of.bytes_at(phase))), phase);
  }
  return text + " on a node";
}

PageTable deepspeed_table(const DeepSpeedForecast& of) {
  PageTable table{
      .caption = fmt::format("Forecast by line: DeepSpeed {}, ZeRO stage {}, a rank "
                             "that keeps {} of {} parameters",
                             of.version, of.stage, of.params_of_rank, of.params),
      .head = {"what", "owner", "allocated at", "per node", "per rank", "bytes per parameter"}};
  const auto add = [&](std::string_view what, std::string_view owner, std::string_view phase,
                       uint64_t bytes) {
    table.rows.push_back({std::string(what), std::string(owner), std::string(phase),
                          format_size(of.on_node(bytes)), format_size(bytes),
                          fmt::format("{:.2f}", of.per_param(bytes))});
  };
  for (const DeepSpeedForecast::Line& line : of.lines) {
    add(line.name, line.owner, line.phase, line.bytes);
  }
  for (const std::string_view owner : kForecastOwners) {
    if (of.bytes_of(owner) > 0) add("sum", owner, "", of.bytes_of(owner));
  }
  for (const std::string_view phase : kPhases) add("sum of all", "", phase, of.bytes_at(phase));
  return table;
}

}  // namespace modicum
