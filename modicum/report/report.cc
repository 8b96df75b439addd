#include "modicum/report/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {
namespace {

std::string_view node_peak_phase(const Promise& promise, int node) {
  const auto total = [&](const Phase& phase) { return promise.on_node(node, &phase).total(); };
  const auto peak =
      std::max_element(promise.phases.begin(), promise.phases.end(),
                       [&](const Phase& a, const Phase& b) { return total(a) < total(b); });
  return peak->name;
}

void phase_object(JsonWriter& out, std::string_view name, const Footprint& footprint) {
  out.begin_object().member("phase", name).member("bytes", footprint.total());
  out.key("by_purpose").begin_object();
  for (size_t p = 0; p < footprint.bytes.size(); ++p) {
    if (footprint.bytes[p] > 0)
      out.member(purpose_name(static_cast<Purpose>(p)), footprint.bytes[p]);
  }
  out.end_object().end_object();
}

void phases_member(JsonWriter& out, const Promise& promise, int node) {
  out.key("phases").begin_array();
  for (const Phase& phase : promise.phases) {
    phase_object(out, phase.name, promise.on_node(node, &phase));
  }
  out.end_array();
}

// `phases`: phases_of(job).
void job_member(JsonWriter& out, const JobPromise& job, std::span<const JobPhase> phases,
                int node) {
  out.key("job").begin_object().member("peak_bytes", job.node_peak_bytes(node));
  out.member("save_peak_bytes", job.save.node_peak_bytes(node));
  out.member("resume_peak_bytes", job.resume.node_peak_bytes(node));
  out.key("phases").begin_array();
  for (const JobPhase& phase : phases) {
    phase_object(out, phase.name, phase.promise.on_node(node));
  }
  out.end_array().end_object();
}

// `device_bytes`: PlanReport::device_bytes.
void strategy_object(JsonWriter& out, const StrategyReport& strategy,
                     std::span<const uint64_t> device_bytes) {
  out.begin_object().member("name", strategy.strategy);
  out.member("storage_read_bytes", strategy.traffic.storage_read_bytes);
  out.member("exchanged_bytes", strategy.traffic.exchanged_bytes);
  out.member("reads", strategy.traffic.reads);
  out.member("overread_ratio", strategy.overread_ratio());
  const std::vector<JobPhase> job_phases =
      strategy.job ? phases_of(*strategy.job) : std::vector<JobPhase>{};
  out.key("nodes").begin_array();
  for (int node = 0; node < strategy.promise.nodes(); ++node) {
    out.begin_object().member("node", node);
    out.member("peak_bytes", strategy.promise.node_peak_bytes(node));
    out.member("peak_phase", node_peak_phase(strategy.promise, node));
    out.member("peak_cause", peak_cause(strategy.promise, node));
    phases_member(out, strategy.promise, node);
    if (strategy.job) job_member(out, *strategy.job, job_phases, node);
    if (!strategy.timelines.empty())
      timeline_member(out, strategy.timelines[static_cast<size_t>(node)]);
    out.end_object();
  }
  out.end_array().key("ranks").begin_array();
  for (int rank = 0; rank < strategy.promise.ranks(); ++rank) {
    out.begin_object().member("rank", rank);
    out.member("node", strategy.promise.node_of_rank[static_cast<size_t>(rank)]);
    out.member("peak_bytes", strategy.promise.rank_peak_bytes(rank));
    if (!device_bytes.empty()) {
      out.member("device_bytes", device_bytes[static_cast<size_t>(rank)]);
    }
    out.end_object();
  }
  out.end_array().end_object();
}

void shortfall_member(JsonWriter& out, const PlanReport& report) {
  uint64_t shortfall_bytes = 0;  // of the load or of DeepSpeed, which needs more
  if (report.refusal) shortfall_bytes = report.refusal->facts().shortfall_bytes.value_or(0);
  if (!report.deepspeed_fits.value_or(true)) {
    const uint64_t needed = report.deepspeed->on_node(report.deepspeed->peak_bytes());
    shortfall_bytes = std::max(shortfall_bytes, needed - report.budget->bytes);
  }
  out.member("shortfall_bytes", shortfall_bytes);
}

void alternatives_member(JsonWriter& out, const PlanReport& report) {
  out.key("would_fit").begin_array();
  for (const Alternative& alternative : report.alternatives) alternative_object(out, alternative);
  out.end_array();
}

// The requested strategy, or all.
std::vector<const StrategyReport*> shown_strategies(const PlanReport& report, bool compares) {
  std::vector<const StrategyReport*> shown;
  for (const StrategyReport& strategy : report.strategies) {
    if (compares || strategy.strategy == report.strategy) shown.push_back(&strategy);
  }
  return shown;
}

// A table of the job's phases, by strategy. Each figure is that of the node that is fullest in this
// phase.
std::string job_text(std::span<const StrategyReport* const> strategies) {
  if (strategies.empty() || !strategies.front()->job) return "";
  std::string text =
      fmt::format("\npeak per node by phase; the same number of ranks resumes\n{:<17}", "");
  for (const JobPhase& phase : phases_of(*strategies.front()->job)) {
    text += fmt::format(" {:>12}", phase.name);
  }
  for (const StrategyReport* strategy : strategies) {
    text += fmt::format("\n{:<17}", strategy->strategy);
    for (const JobPhase& phase : phases_of(*strategy->job)) {
      const Promise& promise = phase.promise;
      text += fmt::format(" {:>12}", format_size(promise.node_peak_bytes(worst_node(promise))));
    }
  }
  return text + "\n";
}

std::string past_text(const PlanReport& report) {
  return report.past ? past_run_sentence(report) + "\n" : "";
}

// The cause of the peak for a table, whose lines have at most 120 columns: the second owner is left
// out if it does not fit.
std::string short_cause(const Promise& promise, int node, size_t columns) {
  const std::string cause = peak_cause(promise, node);
  return cause.size() <= columns ? cause : cause.substr(0, cause.find(','));
}

// A table of memory and traffic, by strategy.
std::string strategies_text(const PlanReport& report,
                            std::span<const StrategyReport* const> strategies) {
  const bool on_device = !report.device_bytes.empty();
  std::string device;  // the column of --device, which shortens the last one
  const auto line = [&](const auto&... cells) {
    return fmt::format("{:<15} {:>13} {:>12} {:>10} {:>11} {:>10}{}  {}\n", cells...);
  };
  if (on_device) device = fmt::format(" {:>12}", "on a device");
  std::string text = line("strategy", "peak per node", "largest rank", "read", "read/needed",
                          "sent", device, "at the peak");
  if (on_device) {
    device = fmt::format(" {:>12}", format_size(*std::max_element(report.device_bytes.begin(),
                                                                  report.device_bytes.end())));
  }
  for (const StrategyReport* strategy : strategies) {
    const int worst = worst_node(strategy->promise);
    uint64_t largest = 0;
    for (int rank = 0; rank < strategy->promise.ranks(); ++rank) {
      largest = std::max(largest, strategy->promise.rank_peak_bytes(rank));
    }
    text += line(strategy->strategy, format_size(strategy->promise.node_peak_bytes(worst)),
                 format_size(largest), format_size(strategy->traffic.storage_read_bytes),
                 fmt::format("{:.3f}", strategy->overread_ratio()),
                 format_size(strategy->traffic.exchanged_bytes), device,
                 short_cause(strategy->promise, worst, on_device ? 27 : 40));
  }
  return text;
}

template <typename Field>
uint64_t sum_over(const LoadReport& report, Field field) {
  uint64_t sum = 0;
  for (const RankOutcome& rank : report.ranks) sum += rank.*field;
  return sum;
}

}  // namespace

std::vector<JobPhase> phases_of(const JobPromise& job) {
  std::vector<JobPhase> phases;  // not from a braced list, which would copy each promise
  phases.push_back({"load", part_of(job.save, Part::load)});
  phases.push_back({"step", part_of(job.save, Part::step)});
  phases.push_back({"save", part_of(job.save, Part::save)});
  phases.push_back({"resume", part_of(job.resume, Part::resume)});
  phases.push_back({"step_resumed", part_of(job.resume, Part::step)});
  return phases;
}

const StrategyReport& PlanReport::requested() const {
  const auto found = std::find_if(strategies.begin(), strategies.end(), [&](const auto& candidate) {
    return candidate.strategy == strategy;
  });
  MODICUM_ASSERT(found != strategies.end());
  return *found;
}

double StrategyReport::overread_ratio() const noexcept {
  if (needed_bytes == 0) return 1;
  return static_cast<double>(traffic.storage_read_bytes) / static_cast<double>(needed_bytes);
}

uint64_t JobPromise::node_peak_bytes(int node) const {
  return std::max(save.node_peak_bytes(node), resume.node_peak_bytes(node));
}

std::string plan_json(const PlanReport& report) {
  JsonWriter out;
  out.begin_object();
  checkpoint_members(out, report.checkpoint);
  out.member("ranks", report.ranks).member("strategy", report.strategy);
  out.key("strategies").begin_array();
  for (const StrategyReport& strategy : report.strategies) {
    strategy_object(out, strategy, report.device_bytes);
  }
  out.end_array();
  budget_member(out, report.budget);
  out.member("fits", report.fits);
  if (report.job_fits) out.member("job_fits", *report.job_fits);
  if (!report.job_fits.value_or(true)) {
    out.member("job_shortfall_bytes", job_bytes(report) - report.budget->bytes);
  }
  if (report.node_fits) out.member("rl_fits", *report.node_fits);
  if (report.deepspeed_fits) out.member("deepspeed_fits", *report.deepspeed_fits);
  out.key("baseline").begin_object().member("bytes", report.baseline.bytes);
  out.member("source", report.baseline.is_given ? "flag" : "default").end_object();
  const bool is_short = report.refusal || !report.deepspeed_fits.value_or(true);
  if (is_short) shortfall_member(out, report);
  if (is_short || !report.job_fits.value_or(true)) alternatives_member(out, report);
  if (report.past) past_run_member(out, report);
  if (report.deepspeed) deepspeed_member(out, report);
  return out.end_object().text();
}

std::string plan_text(const PlanReport& report, bool compares) {
  const CheckpointFacts& checkpoint = report.checkpoint;
  std::string text = past_text(report);
  for (const std::string& answer : answers(report)) text += wrapped(answer);
  if (report.deepspeed) {
    for (const std::string& sentence : not_counted(report)) text += wrapped(sentence);
  }
  if (!report.baseline.is_given) text += wrapped(baseline_clause(report));
  text += fmt::format(
      "\n{}{} in {}, {}; {}\n", checkpoint.hub ? name_of(*checkpoint.hub) + ": " : "",
      format_size(checkpoint.bytes), counted(checkpoint.tensors, "tensor"),
      counted(checkpoint.files, "file"), counted(static_cast<uint64_t>(report.ranks), "rank"));
  if (!report.optimizer.empty()) text += wrapped(report.optimizer);
  if (compares || !has_only_forecast(report)) {
    const auto strategies = shown_strategies(report, compares);
    text += fmt::format("\n{}{}", strategies_text(report, strategies), job_text(strategies));
  }
  text += timeline_text(report);
  if (report.deepspeed) text += deepspeed_text(*report.deepspeed);
  return text + warnings_text(checkpoint.warnings);
}

std::string digest_text(uint64_t digest) { return fmt::format("{:016x}", digest); }

namespace {

void resumed_members(JsonWriter& out, const ResumedCheckpoint& resumed) {
  out.key("resumed").begin_object().member("step", resumed.step).member("path", resumed.path);
  out.end_object().key("skipped").begin_array();
  for (const ResumedCheckpoint::SkippedCheckpoint& skipped : resumed.skipped) {
    out.begin_object().member("step", skipped.step).member("reason", skipped.reason).end_object();
  }
  out.end_array();
}

std::string resumed_text(const ResumedCheckpoint& resumed) {
  std::string text =
      fmt::format("resumed from step {} ({})\n", resumed.step, printable(resumed.path));
  for (const ResumedCheckpoint::SkippedCheckpoint& skipped : resumed.skipped) {
    text += fmt::format("skipped the checkpoint of step {}: {}\n", skipped.step, skipped.reason);
  }
  return text;
}

}  // namespace

std::string load_json(const LoadReport& report) {
  JsonWriter out;
  out.begin_object();
  checkpoint_members(out, report.checkpoint);
  out.member("strategy", report.strategy);
  out.member("elapsed_s", report.elapsed_s).member("check_s", report.check_s);
  out.member("bytes_loaded", sum_over(report, &RankOutcome::bytes_loaded));
  out.member("storage_read_bytes", sum_over(report, &RankOutcome::storage_read_bytes));
  out.member("exchanged_bytes", sum_over(report, &RankOutcome::exchanged_bytes));
  out.member("coverage", "proven").member("check", report.checked ? "ok" : "off");
  std::optional<std::string> digest;
  if (report.digest) digest = digest_text(*report.digest);
  out.member("digest", digest);
  if (report.resumed) {
    resumed_members(out, *report.resumed);
    state_digest_member(out, report.state_digest);
  }
  compared_members(out, report.compared);
  if (!report.phases.empty()) phases_member(out, report.phases, report.launcher);
  out.member("full_per_rank_bytes",
             report.full_per_rank.node_peak_bytes(worst_node(report.full_per_rank)));
  budget_member(out, report.budget);
  outcome_members(out, {report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  return out.end_object().text();
}

namespace {

// What the same load would need if each rank read the whole model. Empty if it is not more.
std::string full_per_rank_text(const LoadReport& report) {
  const uint64_t needed = report.full_per_rank.node_peak_bytes(worst_node(report.full_per_rank));
  const uint64_t promised = report.promise.node_peak_bytes(worst_node(report.promise));
  if (needed <= promised) return "";
  return fmt::format("if each rank read the whole model: {} per node predicted, {} more\n",
                     format_size(needed), format_size(needed - promised));
}

}  // namespace

std::string load_text(const LoadReport& report) {
  const uint64_t loaded = sum_over(report, &RankOutcome::bytes_loaded);
  const uint64_t read = sum_over(report, &RankOutcome::storage_read_bytes);
  std::string text = report.resumed ? resumed_text(*report.resumed) : "";
  text += fmt::format(
      "{}: {} loaded in {:.2f} s, {} read ({:.3f} x checkpoint); every element loaded once\n{}\n",
      report.strategy, format_size(loaded), report.elapsed_s, format_size(read),
      static_cast<double>(read) /
          static_cast<double>(std::max<uint64_t>(1, report.checkpoint.bytes)),
      report.checked ? fmt::format("values ok ({:.2f} s)\n", report.check_s) : "");
  text += outcome_text({report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  text += full_per_rank_text(report) + budget_text(report.budget) + compared_text(report.compared);
  if (report.digest) text += "digest " + digest_text(*report.digest) + "\n";
  if (report.state_digest) text += "state digest " + digest_text(*report.state_digest) + "\n";
  return text + warnings_text(report.checkpoint.warnings);
}

void error_member(JsonWriter& out, const Error& error) {
  const Facts& facts = error.facts();
  out.key("error").begin_object();
  out.member("category", category_name(error.category()));
  out.member("code", exit_code(error.category()));
  out.member("message", error.what());
  const auto text = [&out](std::string_view key, const std::string& value) {
    if (!value.empty()) out.member(key, value);
  };
  text("file", facts.file);
  text("tensor", facts.tensor);
  if (facts.offset) out.member("offset", *facts.offset);
  if (facts.rank) out.member("rank", *facts.rank);
  if (facts.culprit_rank) out.member("culprit_rank", *facts.culprit_rank);
  if (facts.culprit_pid) out.member("culprit_pid", *facts.culprit_pid);
  if (facts.shortfall_bytes) {  // over budget: the figures are integers
    out.member("shortfall_bytes", *facts.shortfall_bytes);
    const auto integer = [](const std::string& digits) { return uint64_t{std::stoull(digits)}; };
    out.member("expected", integer(facts.expected)).member("got", integer(facts.got));
  } else {
    text("expected", facts.expected);
    text("got", facts.got);
  }
  if (facts.shortfall_bytes || !facts.owners.empty()) {
    out.key("owners").begin_array();
    for (const Owner& owner : facts.owners) {
      out.begin_object().member("purpose", owner.purpose).member("bytes", owner.bytes).end_object();
    }
    out.end_array();
  }
  out.end_object();
}

std::string error_json(const Error& error) {
  JsonWriter out;
  out.begin_object();
  error_member(out, error);
  return out.end_object().text();
}

}  // namespace modicum
