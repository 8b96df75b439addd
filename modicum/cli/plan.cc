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

// `name`: of the checkpoint, in place of the word `directory`.
PageOrigin origin_of(const Args& args, const std::string& directory, const std::string& name) {
  PageOrigin origin{.command = "modicum plan", .version = MODICUM_VERSION};
  for (const std::string& word : args) {
    origin.command += " " + printable(shell_word(word == directory ? name : word));
  }
  const auto now = std::chrono::floor<std::chrono::minutes>(std::chrono::system_clock::now());
  origin.date = fmt::format("{:%Y-%m-%d %H:%M} UTC", now);
  return origin;
}

// What a page calls the model.
std::string name_of(const CheckpointFacts& checkpoint, const std::string& directory) {
  if (checkpoint.hub) return checkpoint.hub->name;
  if (base_name(directory) != "config.json" || checkpoint.model_type.empty()) return directory;
  return fmt::format("{} ({})", checkpoint.model_type, directory);
}

void add_forecast_flags(CLI::App& app, PlanFlags& flags) {
  app.option_defaults()->group("A run that failed");
  app.add_option("--from", flags.from,
                 "JSON of `watch --json`, or of a verb that its budget refused: its limit is the "
                 "budget; lists the fewest changes after which the planned run fits")
      ->type_name("FILE");
  app.option_defaults()->group("DeepSpeed");
  app.add_option("--deepspeed", flags.deepspeed.config,
                 "ds_config.json: forecast DeepSpeed's host memory, and changes that fit")
      ->type_name("FILE");
  app.add_option("--workers", flags.deepspeed.workers,
                 "forked data-loader workers of each rank; default 0");
  app.add_flag("--persistent-workers", flags.deepspeed.persistent_workers,
               "the workers live for all epochs; default: for one epoch");
  app.add_flag("--protect", flags.deepspeed.protect,
               "the program calls modicum.torch.protect: workers keep no copies of its state");
  app.option_defaults()->group("Reinforcement learning");
  app.add_flag("--reference", flags.node.reference,
               "also count a frozen reference model with the trainer's layout");
  app.add_option("--engine-tp", flags.node.engine_tp,
                 "also count sleeping engines, one for N ranks, weights in host memory")
      ->check(CLI::Range(1, kMaxRanks))
      ->option_text("N");
  app.add_flag("--backup", flags.node.backup,
               "also count a host copy of each rank's parameters, for the engines");
}

}  // namespace

int run_plan(const Args& args, const Surroundings& at) {
  CLI::App app(
      "predict reads, traffic and peak memory from headers (the wheel: of ORG/NAME on the hub, "
      "too)",
      "modicum plan");
  CommonFlags common;
  RunFlags flags;
  PlanFlags of_plan;
  std::string page, title;
  bool compares = false;
  add_run_flags(app, flags);
  app.add_flag("--device", flags.on_device,
               "parameters on devices; gradients and optimizer state on the host");
  add_forecast_flags(app, of_plan);
  add_common_flags(app, common,
                   {.budget_default = "none", .staging = &flags.staging, .progress = false});
  CLI::Option* const report_flag =
      app.add_option("--report", page,
                     "write the memory of the fullest node by phase, as an HTML file")
          ->type_name("FILE");
  app.add_option("--title", title, "the title of --report's page; default: it names the model")
      ->type_name("TEXT")
      ->needs(report_flag)
      ->group(kRareFlags);
  app.add_flag("--compare", compares,
               "show every strategy; default: only that of --strategy (--json has all)");
  add_rare_run_flags(app, flags, common);  // accepted as by `load`: --oversubscribe has no effect
  app.get_option("--baseline")->group("Host memory and threads");
  app.get_option("DIR")->description(
      "a directory, a file, a config.json alone, or ORG/NAME (in the local Hugging Face cache; the "
      "wheel: or on the hub)");
  if (const auto done = parse(app, args, at)) return *done;
  of_plan.budget = common.budget;
  flags.threads = common.threads;
  std::optional<ResultFile> file;
  if (!page.empty()) file.emplace(at.files, "--report", page);
  const PlanReport report = job_report(at.files, flags, of_plan);
  if (file) {
    const std::string name = name_of(report.checkpoint, flags.directory);
    file->write(plan_page(report,
                          title.empty() ? "Predicted host memory of " + name : printable(title),
                          origin_of(args, flags.directory, name)));
  }
  print_result(
      common, at, [&] { return plan_json(report); }, [&] { return plan_text(report, compares); });
  const std::optional<Error>& refusal = report.refusal ? report.refusal : report.wider_refusal;
  if (!refusal) return 0;
  at.print_error(fmt::format("modicum: {}\n", refusal->what()));
  return exit_code(refusal->category());
}

}  // namespace modicum
