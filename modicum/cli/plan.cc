#include <fmt/chrono.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>

#include "modicum/cli/result_file.h"
#include "modicum/cli/verbs.h"
#include "modicum/training/training.h"

namespace modicum {
namespace {

// The word as a shell reads it back.
std::string shell_word(const std::string& word) {
  static constexpr std::string_view kPlain = "-_./:=,@%+";
  const auto is_plain = [](char c) {
    const bool is_alphanumeric =
        (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    return is_alphanumeric || kPlain.find(c) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

PageOrigin origin_of(const Args& args) {
  PageOrigin origin{.command = "modicum plan", .version = MODICUM_VERSION};
  for (const std::string& word : args) origin.command += " " + printable(shell_word(word));
  const auto now = std::chrono::floor<std::chrono::minutes>(std::chrono::system_clock::now());
  origin.date = fmt::format("{:%Y-%m-%d %H:%M} UTC", now);
  return origin;
}

}  // namespace

int run_plan(const Args& args, const Surroundings& at) {
  CLI::App app("predict reads, traffic and peak memory of every strategy; reads headers only",
               "modicum plan");
  CommonFlags common;
  RunFlags flags;
  add_common_flags(app, common);
  add_run_flags(app, flags);
  add_oversubscribe_flag(app, common);  // no effect, but `plan` accepts the run flags of `load`
  PlanFlags of_plan;
  DeepSpeedFlags& deepspeed = of_plan.deepspeed;
  std::string page;
  app.add_option("--deepspeed", deepspeed.config,
                 "ds_config.json: add a forecast of DeepSpeed's own host memory");
  app.add_option("--workers", deepspeed.workers,
                 "with --deepspeed: forked data-loader workers per rank; default 0");
  app.add_flag(
      "--persistent-workers", deepspeed.persistent_workers,
      "with --deepspeed: the workers live for all epochs; default: they are forked for each "
      "epoch");
  app.add_option("--from", of_plan.from,
                 "a JSON document that `watch --json` printed, or that a verb with "
                 "--json printed when its budget refused it. Its limit is the budget, "
                 "unless --budget is given. If the planned run does not fit, plan "
                 "lists the runs that fit after the fewest changes");
  app.add_flag("--reference", of_plan.node.reference,
               "reinforcement learning: also count a frozen reference model with the "
               "trainer's layout");
  app.add_option("--engine-tp", of_plan.node.engine_tp,
                 "reinforcement learning: also count sleeping inference engines, one "
                 "for each N ranks, whose weights are in host memory")
      ->check(CLI::Range(1, kMaxRanks));
  app.add_flag("--backup", of_plan.node.backup,
               "reinforcement learning: also count a host copy of each rank's "
               "parameters, made when they are first sent to the inference engines");
  app.add_option("--report", page,
                 "write the memory of the fullest node in each phase as an HTML file, with the "
                 "inputs; with --deepspeed, DeepSpeed's memory");
  if (const auto done = parse(app, args, at)) return *done;
  of_plan.budget = common.budget;
  flags.threads = common.threads;
  std::optional<ResultFile> file;
  if (!page.empty()) file.emplace(at.files, "--report", page);
  const PlanReport report = job_report(at.files, flags, of_plan);
  if (file) file->write(plan_page(report, "modicum plan " + flags.directory, origin_of(args)));
  print_result(
      common, at, [&] { return plan_json(report); }, [&] { return plan_text(report); });
  const std::optional<Error>& refusal = report.refusal ? report.refusal : report.wider_refusal;
  if (!refusal) return 0;
  at.print_error(fmt::format("modicum: {}\n", refusal->what()));
  return exit_code(refusal->category());
}

}  // namespace modicum
