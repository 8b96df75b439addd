// The answer of `plan`: whether a run fits its budget, and the changes after which it does.
#include <fmt/format.h>

#include <algorithm>

#include "modicum/report/members.h"

namespace modicum {
namespace {

// Host memory of a process that has imported torch and the libraries of a training, before its load
// (docs/guide/plan.md#baseline).
constexpr double kTorchLeastGib = 0.3;
constexpr double kTorchMostGib = 1.5;

// One of those that must fit the budget of a node.
struct Holder {
  std::string_view who;
  uint64_t bytes = 0;  // at its peak, on the fullest node
};

// What Modicum does in the requested run.
std::string_view parts_of(const PlanReport& report) {
  const bool has_others = report.deepspeed.has_value();
  if (report.optimizer.empty()) return has_others ? "the load by Modicum" : "the load";
  return has_others ? "load and steps by Modicum" : "load and steps";
}

// The largest first.
std::vector<Holder> holders_of(const PlanReport& report) {
  const StrategyReport& run = report.requested();
  std::vector<Holder> holders;
  if (!has_only_forecast(report) || report.refusal) {
    holders.push_back({parts_of(report), run.promise.node_peak_bytes(worst_node(run.promise))});
  }
  if (!run.timelines.empty()) {
    const auto fullest = static_cast<size_t>(fullest_timeline(run));
    holders.push_back({"all holders of the node", run.timelines[fullest].peak_bytes()});
  }
  if (has_forecast(report)) {
    const DeepSpeedForecast& forecast = *report.deepspeed;
    holders.push_back({"DeepSpeed", forecast.on_node(forecast.peak_bytes())});
  }
  std::stable_sort(holders.begin(), holders.end(),
                   [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  return holders;
}

// "12.00 MiB left" or "short by 1 B".
std::string rest_text(uint64_t budget, uint64_t needed) {
  if (needed <= budget) return format_size(budget - needed) + " left";
  return "short by " + format_size(needed - budget);
}

std::string need_of(const PlanReport& report, const Holder& holder) {
  std::string text = fmt::format("needs {} per node for {}", format_size(holder.bytes), holder.who);
  const auto& job = report.requested().job;
  if (!holder.who.starts_with("load and steps") || !job) return text;
  return text + fmt::format(", {} with a save and a resume", format_size(job_bytes(report)));
}

std::string verdict_of(const PlanReport& report, const Holder& holder) {
  const Budget& budget = *report.budget;
  const bool is_over = holder.bytes > budget.bytes;
  const std::string_view word = is_over                          ? "does not fit"
                                : report.job_fits.value_or(true) ? "fits"
                                                                 : "load and steps fit";
  return fmt::format("{}: budget {} per node ({}), needed {} for {}, {}", word,
                     format_size(budget.bytes), budget.source, format_size(holder.bytes),
                     holder.who, rest_text(budget.bytes, holder.bytes));
}

// What the memory that torch takes in each rank does to a run with `ranks` on a node that leaves
// `left_bytes`; empty if it fits, too.
std::string_view with_torch(uint64_t left_bytes, double ranks) {
  const double left_gib = static_cast<double>(left_bytes) / kGiB;
  if (left_gib < kTorchLeastGib * ranks) return "does not fit";
  return left_gib < kTorchMostGib * ranks ? "may not fit" : "";
}

std::string alternative_text(const PlanReport& report, const Alternative& alternative) {
  const auto nodes = static_cast<uint64_t>(ceil_div(report.ranks, alternative.ranks_per_node));
  const std::string where =
      nodes == 1 ? "on 1 node" : fmt::format("on each of {}", counted(nodes, "node"));
  // Of several holders, only parts_of has been planned with the changes.
  std::string who;
  if (!report.node_fits.value_or(true)) {
    who = fmt::format("{} alone ", parts_of(report));
  } else if (!report.deepspeed_fits.value_or(true)) {
    who = fmt::format("{} ", parts_of(report));
  }
  if (!alternative.who.empty()) who = fmt::format("{} ", alternative.who);
  std::string text = fmt::format("{}would fit: {}: {} {}", who, changes_text(alternative),
                                 format_size(alternative.peak_bytes), where);
  if (!alternative.note.empty()) text += "; " + alternative.note;
  if (report.baseline.is_given) return text;
  const std::string_view word = with_torch(report.budget->bytes - alternative.peak_bytes,
                                           std::min(alternative.ranks_per_node, report.ranks));
  return word.empty() ? text : text + fmt::format("; with torch it {}", word);
}

// Of the requested run, of DeepSpeed and of Modicum in its place: the first of the alternatives on
// the same nodes, and the first with fewer ranks per node. Of DeepSpeed all on the same nodes,
// which are equally many changes of different kinds.
std::vector<std::string> alternatives_text(const PlanReport& report) {
  std::vector<std::string> lines;
  const Alternative* last = nullptr;
  size_t groups = 0;  // of alternatives on equally many nodes, about last->who
  for (const Alternative& alternative : report.alternatives) {
    const bool is_first = last == nullptr || alternative.who != last->who;
    const bool is_of_group = !is_first && alternative.ranks_per_node == last->ranks_per_node;
    const bool is_equal = is_of_group && alternative.who == kDeepSpeed &&
                          alternative.ranks_per_node >= report.deepspeed->ranks_of_node;
    groups = is_first ? 1 : groups + (is_of_group ? 0 : 1);
    last = &alternative;
    if (is_equal || (!is_of_group && groups <= 2)) {
      lines.push_back(alternative_text(report, alternative));
    }
  }
  return lines;
}

}  // namespace

bool has_only_forecast(const PlanReport& report) {
  return has_forecast(report) && report.optimizer.empty();
}

uint64_t job_bytes(const PlanReport& report) {
  const JobPromise& job = report.requested().job.value();
  return std::max(job.save.node_peak_bytes(worst_node(job.save)),
                  job.resume.node_peak_bytes(worst_node(job.resume)));
}

std::string job_shortfall(const PlanReport& report) {
  const uint64_t needed = job_bytes(report);
  return fmt::format("the save, or a resume by the same number of ranks: needed {}, {}",
                     format_size(needed), rest_text(report.budget->bytes, needed));
}

std::vector<std::string> answers(const PlanReport& report) {
  const std::vector<Holder> holders = holders_of(report);
  std::vector<std::string> lines;
  if (report.deepspeed && !has_forecast(report)) {
    lines.emplace_back(
        "without offload_optimizer DeepSpeed holds no optimizer state in host memory; what follows "
        "is about Modicum alone");
  }
  if (!report.budget) {
    for (const Holder& holder : holders) lines.push_back(need_of(report, holder));
    return lines;
  }
  lines.push_back(verdict_of(report, holders.front()));
  for (size_t i = 1; i < holders.size(); ++i) {
    lines.push_back(fmt::format("{}: needed {}, {}", holders[i].who, format_size(holders[i].bytes),
                                rest_text(report.budget->bytes, holders[i].bytes)));
  }
  if (!report.refusal && !report.job_fits.value_or(true)) lines.push_back(job_shortfall(report));
  for (std::string& line : alternatives_text(report)) lines.push_back(std::move(line));
  const auto has_none = [&](auto is_about) {
    return std::none_of(report.alternatives.begin(), report.alternatives.end(), is_about);
  };
  const bool is_short = report.refusal || !report.job_fits.value_or(true);
  if (is_short && has_none([](const Alternative& other) { return other.who.empty(); })) {
    lines.emplace_back(
        "no other dtype, state format, strategy, staging or ranks per node fits either");
  }
  const auto is_deepspeed = [](const Alternative& other) { return other.who == kDeepSpeed; };
  const auto is_on_as_many_nodes = [&](const Alternative& other) {
    return is_deepspeed(other) && other.ranks_per_node >= report.deepspeed->ranks_of_node;
  };
  if (!report.deepspeed_fits.value_or(true) && has_none(is_on_as_many_nodes)) {
    lines.push_back(
        fmt::format("DeepSpeed: no pin_memory, offload_param, stage, workers or protection fits {}",
                    has_none(is_deepspeed) && !report.budget->is_shared ? "on any number of nodes"
                                                                        : "on as many nodes"));
  }
  return lines;
}

std::string changes_text(const Alternative& alternative) {
  if (alternative.config.empty()) return alternative.flags;
  const std::string_view comma = alternative.flags.empty() ? "" : ", ";
  return fmt::format("{}{}{} in ds_config.json", alternative.flags, comma, alternative.config);
}

std::vector<std::string> not_counted(const PlanReport& report) {
  const uint64_t bytes = report.deepspeed->on_node(report.checkpoint.bytes);
  const bool is_over = report.budget && bytes > report.budget->bytes;
  return {fmt::format(
      "not counted: what from_pretrained holds before deepspeed.initialize; if each rank holds the "
      "stored weights, {} per node{}",
      format_size(bytes), is_over ? ", which does not fit" : "")};
}

std::string wrapped(std::string_view line) {
  constexpr size_t kColumns = 120;
  constexpr std::string_view kIndent = "           ";  // as long as "would fit: "
  std::string text;
  size_t columns = kColumns;
  while (line.size() > columns) {
    const size_t space = line.rfind(' ', columns);
    if (space == std::string_view::npos) break;
    text += fmt::format("{}\n{}", line.substr(0, space), kIndent);
    line.remove_prefix(space + 1);
    columns = kColumns - kIndent.size();
  }
  return text + fmt::format("{}\n", line);
}

std::string baseline_clause(const PlanReport& report) {
  const Promise& promise = report.requested().promise;
  const int node = worst_node(promise);
  const auto ranks = static_cast<double>(std::count(
      promise.node_of_rank.begin(), promise.node_of_rank.end(), static_cast<uint32_t>(node)));
  const double least = kTorchLeastGib * ranks;
  const double most = kTorchMostGib * ranks;
  std::string text = fmt::format(
      "a rank process counts {}{} (no --baseline); with torch it holds {} to {} GiB: {:.1f} to "
      "{:.1f} GiB more per node",
      format_size(report.baseline.bytes),
      has_forecast(report) ? " in Modicum's figures, nothing in DeepSpeed's" : "", kTorchLeastGib,
      kTorchMostGib, least, most);
  const uint64_t needed_bytes = holders_of(report).front().bytes;
  if (!report.budget || needed_bytes > report.budget->bytes) return text;
  const std::string_view word = with_torch(report.budget->bytes - needed_bytes, ranks);
  return word.empty() ? text : text + fmt::format(", which {}", word);
}

void alternative_object(JsonWriter& out, const Alternative& alternative) {
  out.begin_object().member("strategy", alternative.strategy);
  std::optional<std::string_view> format, dtype;
  if (alternative.state_format) format = row_of(*alternative.state_format).name;
  if (alternative.dtype) dtype = torch_name(*alternative.dtype);
  out.member("staging_bytes", alternative.staging_bytes).member("state_format", format);
  out.member("dtype", dtype).member("ranks_per_node", alternative.ranks_per_node);
  out.member("peak_bytes", alternative.peak_bytes);
  const std::string& note = alternative.note;
  std::optional<std::string> lossless, lossy;
  if (alternative.is_lossless) {
    const bool is_deepspeed = alternative.who == kDeepSpeed;  // whose notes are about the program
    lossless = format || is_deepspeed ? "same weights, master and moments" : "same weights";
    if (!note.empty()) lossless = is_deepspeed ? fmt::format("{}; {}", *lossless, note) : note;
  } else {
    lossy = note;
  }
  out.member("lossless", lossless).member("lossy", lossy);
  out.member("flags", alternative.flags);
  if (!alternative.who.empty()) out.member("who", alternative.who);
  if (!alternative.config.empty()) out.key("config").json(alternative.config);
  out.end_object();
}

}  // namespace modicum
