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

void DeepSpeedForecast::Sum::add(const Line& line) noexcept {
  bytes += line.bytes;
  if (line.is_fixed) fixed_bytes += line.bytes;
}

DeepSpeedForecast::Sum DeepSpeedForecast::sum_at(std::string_view phase) const noexcept {
  Sum sum;
  for (const std::string_view each : kPhases) {
    for (const Line& line : lines) {
      if (line.phase == each) sum.add(line);
    }
    if (each == phase) break;
  }
  return sum;
}

DeepSpeedForecast::Sum DeepSpeedForecast::sum_of(std::string_view owner) const noexcept {
  Sum sum;
  for (const Line& line : lines) {
    if (line.owner == owner) sum.add(line);
  }
  return sum;
}

std::span<const std::string_view> DeepSpeedForecast::phases() noexcept { return kPhases; }

uint64_t DeepSpeedForecast::peak_bytes() const noexcept { return sum_at(kPhases.back()).bytes; }

uint64_t DeepSpeedForecast::on_node(uint64_t bytes) const noexcept {
  return saturating_mul(bytes, static_cast<uint64_t>(ranks_of_node));
}

bool has_forecast(const PlanReport& report) {
  return report.deepspeed && !report.deepspeed->lines.empty();
}

std::optional<Error> refusal_of_deepspeed(const PlanReport& report) {
  const DeepSpeedForecast& forecast = *report.deepspeed;
  std::vector<Owner> owners;
  for (const std::string_view owner : kForecastOwners) {
    const uint64_t bytes = forecast.on_node(forecast.sum_of(owner).bytes);
    if (bytes > 0) owners.push_back({std::string(owner), bytes});
  }
  sort_by_bytes(owners);
  return refusal_of({.who = "DeepSpeed",
                     .bytes = forecast.on_node(forecast.peak_bytes()),
                     .when = fmt::format("on a node by {}", kPhases.back()),
                     .owners = std::move(owners)},
                    *report.budget);
}

double DeepSpeedForecast::per_param(const Sum& sum) const noexcept {
  const auto bytes = static_cast<double>(sum.bytes - sum.fixed_bytes);
  return params_of_rank == 0 ? 0 : bytes / static_cast<double>(params_of_rank);
}

namespace {

DeepSpeedForecast::Sum sum_of_line(const DeepSpeedForecast::Line& line) {
  DeepSpeedForecast::Sum sum;
  sum.add(line);
  return sum;
}

// Of a line or a sum: bytes per parameter, or the word "fixed".
std::string per_param_text(const DeepSpeedForecast& forecast, const DeepSpeedForecast::Sum& sum) {
  const bool is_fixed = sum.bytes > 0 && sum.bytes == sum.fixed_bytes;
  return is_fixed ? "fixed" : fmt::format("{:.2f}", forecast.per_param(sum));
}

}  // namespace

void deepspeed_member(JsonWriter& out, const PlanReport& report) {
  const DeepSpeedForecast& forecast = *report.deepspeed;
  const auto amount = [&](const DeepSpeedForecast::Sum& sum) {
    out.member("bytes_per_param", forecast.per_param(sum)).member("fixed_bytes", sum.fixed_bytes);
    out.member("rank_bytes", sum.bytes).member("node_bytes", forecast.on_node(sum.bytes));
    out.end_object();
  };
  out.key("deepspeed")
      .begin_object()
      .member("version", forecast.version)
      .member("stage", forecast.stage);
  out.member("params", forecast.params).member("params_of_rank", forecast.params_of_rank);
  out.member("ranks_of_node", forecast.ranks_of_node).key("lines").begin_array();
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    out.begin_object().member("name", line.name).member("owner", line.owner);
    out.member("phase", line.phase)
        .member("bytes_per_param", forecast.per_param(sum_of_line(line)));
    out.member("is_fixed", line.is_fixed).member("bytes", line.bytes).end_object();
  }
  out.end_array().key("not_counted").begin_array();
  for (const std::string& sentence : not_counted(report)) out.value(sentence);
  out.end_array().key("totals").begin_object();
  for (const std::string_view phase : kPhases) {
    out.key(phase).begin_object();
    amount(forecast.sum_at(phase));
  }
  out.end_object().key("by_owner").begin_object();
  for (const std::string_view owner : kForecastOwners) {
    out.key(owner).begin_object();
    amount(forecast.sum_of(owner));
  }
  out.end_object().key("ours").begin_array();
  for (const DeepSpeedForecast::StateFormatBytes& ours : forecast.ours) {
    out.begin_object().member("state_format", row_of(ours.format).name);
    amount({ours.bytes});
  }
  out.end_array().end_object();
}

namespace {

std::string total_text(const DeepSpeedForecast& forecast, std::string_view what,
                       const DeepSpeedForecast::Sum& sum) {
  return fmt::format("{:<26} {:>12} {:>10}  per node: {}{}\n", what, format_size(sum.bytes),
                     per_param_text(forecast, sum), format_size(forecast.on_node(sum.bytes)),
                     sum.fixed_bytes == 0 || sum.fixed_bytes == sum.bytes
                         ? ""
                         : fmt::format("; fixed: {}", format_size(sum.fixed_bytes)));
}

// A table of the lines, and sums by owner and by phase.
std::string lines_text(const DeepSpeedForecast& forecast) {
  std::string text = fmt::format("\n{:<9} {:<16} {:>12} {:>10}  {}\n", "taken at", "owner", "bytes",
                                 "per param", "what");
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    text += fmt::format("{:<9} {:<16} {:>12} {:>10}  {}\n", line.phase, line.owner,
                        format_size(line.bytes), per_param_text(forecast, sum_of_line(line)),
                        line.name);
  }
  text += '\n';
  for (const std::string_view owner : kForecastOwners) {
    const DeepSpeedForecast::Sum sum = forecast.sum_of(owner);
    if (sum.bytes > 0) text += total_text(forecast, fmt::format("sum of {}", owner), sum);
  }
  text += '\n';
  for (const std::string_view phase : kPhases) {
    text += total_text(forecast, fmt::format("all by {}", phase), forecast.sum_at(phase));
  }
  return text;
}

}  // namespace

std::string deepspeed_text(const DeepSpeedForecast& forecast) {
  std::string text = fmt::format(
      "\nDeepSpeed {}, ZeRO stage {}: host memory of a rank that keeps {} of {} parameters\n",
      forecast.version, forecast.stage, forecast.params_of_rank, forecast.params);
  text += forecast.lines.empty() ? "no optimizer state\n" : lines_text(forecast);
  text +=
      "\nModicum's optimizer state by format, held from the beginning; fp32 does not include the 2 "
      "bytes of a 16-bit parameter\n";
  for (const DeepSpeedForecast::StateFormatBytes& ours : forecast.ours) {
    text += total_text(forecast, row_of(ours.format).name, {ours.bytes});
  }
  return text;
}

std::string deepspeed_sentence(const DeepSpeedForecast& forecast) {
  std::string text = fmt::format("DeepSpeed {}, ZeRO-{}, needs", forecast.version, forecast.stage);
  for (const std::string_view phase : kPhases) {
    text += fmt::format("{} {} by {}", phase == kPhases.front() ? "" : ",",
                        format_size(forecast.on_node(forecast.sum_at(phase).bytes)), phase);
  }
  return text + " on a node";
}

PageTable deepspeed_table(const DeepSpeedForecast& forecast) {
  PageTable table{.caption = fmt::format("Forecast by line: DeepSpeed {}, ZeRO stage {}, a rank "
                                         "that keeps {} of {} parameters",
                                         forecast.version, forecast.stage, forecast.params_of_rank,
                                         forecast.params),
                  .head = {"what", "owner", "allocated at", "per node", "per rank",
                           "fixed, per rank", "bytes per parameter"}};
  const auto add = [&](std::string_view what, std::string_view owner, std::string_view phase,
                       const DeepSpeedForecast::Sum& sum) {
    table.rows.push_back({std::string(what), std::string(owner), std::string(phase),
                          format_size(forecast.on_node(sum.bytes)), format_size(sum.bytes),
                          format_size(sum.fixed_bytes), per_param_text(forecast, sum)});
  };
  for (const DeepSpeedForecast::Line& line : forecast.lines) {
    add(line.name, line.owner, line.phase, sum_of_line(line));
  }
  for (const std::string_view owner : kForecastOwners) {
    if (forecast.sum_of(owner).bytes > 0) add("sum", owner, "", forecast.sum_of(owner));
  }
  for (const std::string_view phase : kPhases) add("sum of all", "", phase, forecast.sum_at(phase));
  return table;
}

}  // namespace modicum
