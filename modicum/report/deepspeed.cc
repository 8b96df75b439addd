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
  const DeepSpeedForecast& forecast = *report.deepspeed;
  std::vector<Owner> owners;
  for (const std::string_view owner : kForecastOwners) {
    const uint64_t bytes = forecast.on_node(forecast.bytes_of(owner));
    if (bytes > 0) owners.push_back({std::string(owner), bytes});
  }
  sort_by_bytes(owners);
  return refusal_of({.who = "DeepSpeed",
                     .bytes = forecast.on_node(forecast.peak_bytes()),
                     .when = fmt::format("on a node by {}", kPhases.back()),
                     .owners = std::move(owners)},
                    *report.budget);
}

double DeepSpeedForecast::per_param(uint64_t bytes) const noexcept {
  return params_of_rank == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(params_of_rank);
}

void deepspeed_member(JsonWriter& out, const DeepSpeedForecast& forecast) {
  const auto amount = [&](uint64_t bytes) {
    out.member("bytes_per_param", forecast.per_param(bytes)).member("rank_bytes", bytes);
    out.member("node_bytes", forecast.on_node(bytes)).end_object();
  };
  out.key("deepspeed")
      .begin_object()
      .member("version", forecast.version)
      .member("stage", forecast.stage);
  out.member("params", forecast.params).member("params_of_rank", forecast.params_of_rank);
  out.member("ranks_of_node", forecast.ranks_of_node).key("lines").begin_array();
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    out.begin_object().member("name", line.name).member("owner", line.owner);
    out.member("phase", line.phase).member("bytes_per_param", line.bytes_per_param);
    out.member("bytes", line.bytes).end_object();
  }
  out.end_array().key("totals").begin_object();
  for (const std::string_view phase : kPhases) {
    out.key(phase).begin_object();
    amount(forecast.bytes_at(phase));
  }
  out.end_object().key("by_owner").begin_object();
  for (const std::string_view owner : kForecastOwners) {
    out.key(owner).begin_object();
    amount(forecast.bytes_of(owner));
  }
  out.end_object().key("ours").begin_array();
  for (const DeepSpeedForecast::StateFormatBytes& ours : forecast.ours) {
    out.begin_object().member("state_format", row_of(ours.format).name);
    amount(ours.bytes);
  }
  out.end_array().end_object();
}

std::string deepspeed_text(const DeepSpeedForecast& forecast) {
  std::string text = fmt::format(
      "\nDeepSpeed {}, ZeRO stage {}: host memory of a rank that keeps {} of {} parameters\n\n",
      forecast.version, forecast.stage, forecast.params_of_rank, forecast.params);
  text += fmt::format("{:<9} {:<16} {:>12} {:>10}  {}\n", "taken at", "owner", "bytes", "per param",
                      "what");
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    text += fmt::format("{:<9} {:<16} {:>12} {:>10.2f}  {}\n", line.phase, line.owner,
                        format_size(line.bytes), line.bytes_per_param, line.name);
  }
  const auto total = [&](std::string_view what, uint64_t bytes) {
    text += fmt::format("{:<26} {:>12} {:>10.2f}  per node: {}\n", what, format_size(bytes),
                        forecast.per_param(bytes), format_size(forecast.on_node(bytes)));
  };
  text += '\n';
  for (const std::string_view owner : kForecastOwners) {
    const uint64_t bytes = forecast.bytes_of(owner);
    if (bytes > 0) total(fmt::format("sum of {}", owner), bytes);
  }
  text += '\n';
  for (const std::string_view phase : kPhases) {
    total(fmt::format("all by {}", phase), forecast.bytes_at(phase));
  }
  text += "\nModicum's optimizer state by format, held from the beginning\n";
  for (const DeepSpeedForecast::StateFormatBytes& ours : forecast.ours)
    total(row_of(ours.format).name, ours.bytes);
  return text;
}

std::string deepspeed_sentence(const DeepSpeedForecast& forecast) {
  std::string text = fmt::format("DeepSpeed {}, ZeRO-{}, needs", forecast.version, forecast.stage);
  for (const std::string_view phase : kPhases) {
    text += fmt::format("{} {} by {}", phase == kPhases.front() ? "" : ",",
                        format_size(forecast.on_node(forecast.bytes_at(phase))), phase);
  }
  return text + " on a node";
}

PageTable deepspeed_table(const DeepSpeedForecast& forecast) {
  PageTable table{
      .caption =
          fmt::format("Forecast by line: DeepSpeed {}, ZeRO stage {}, a rank "
                      "that keeps {} of {} parameters",
                      forecast.version, forecast.stage, forecast.params_of_rank, forecast.params),
      .head = {"what", "owner", "allocated at", "per node", "per rank", "bytes per parameter"}};
  const auto add = [&](std::string_view what, std::string_view owner, std::string_view phase,
                       uint64_t bytes) {
    table.rows.push_back({std::string(what), std::string(owner), std::string(phase),
                          format_size(forecast.on_node(bytes)), format_size(bytes),
                          fmt::format("{:.2f}", forecast.per_param(bytes))});
  };
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    add(line.name, line.owner, line.phase, line.bytes);
  }
  for (const std::string_view owner : kForecastOwners) {
    if (forecast.bytes_of(owner) > 0) add("sum", owner, "", forecast.bytes_of(owner));
  }
  for (const std::string_view phase : kPhases)
    add("sum of all", "", phase, forecast.bytes_at(phase));
  return table;
}

}  // namespace modicum
