#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <charconv>
#include <optional>
#include <string>
#include <vector>

#include "modicum/cli/verbs.h"
#include "modicum/kernels/kernels.h"
#include "modicum/training/training.h"

namespace modicum {
namespace {

struct StepFlags {
  CommonFlags common;
  std::string params = "100M";
  std::string format = "fp32";
  std::string grad_dtype = "float32";
  std::string isa;
  std::vector<std::string> loss_scale;
  std::optional<double> clip;
  bool no_compare = false;
  StepTask task;
};

void add_step_flags(CLI::App& app, StepFlags& flags) {
  app.option_defaults()->group("Optimizer");
  app.add_option("--params", flags.params,
                 "number of parameters of all ranks together; default 100M")
      ->type_name("COUNT");
  app.add_option("--state-format", flags.format, "format of the optimizer's state; default fp32")
      ->type_name("FORMAT");
  app.add_option("--ranks", flags.task.ranks, "number of rank processes; default 1")
      ->check(CLI::Range(1, 4096));
  app.add_option("--steps", flags.task.steps, "optimizer steps; default 5")
      ->check(CLI::Range(1, 1000000000));
  app.add_option("--clip", flags.clip, "largest gradient norm; default: no clipping");
  app.add_option(
         "--loss-scale", flags.loss_scale,
         "scale gradients as torch.amp.GradScaler does, from this initial scale, or from 65536 "
         "if the flag has no value; without the flag: no scaling")
      ->expected(0, 1)
      ->type_name("[SCALE]");
  app.add_option("--grad-dtype", flags.grad_dtype, "dtype of the gradients; default float32")
      ->type_name("DTYPE");
  app.add_option("--isa", flags.isa, fmt::format("{}; default: the first", fmt::join(isas(), ", ")))
      ->type_name("NAME");
  add_common_flags(app, flags.common);
  app.option_defaults()->group(kRareFlags);
  add_seed(app, flags.task.seed, "parameters, gradients and random bits");
  app.add_option(
         "--fork-children", flags.task.children,
         "number of children that each rank forks, which live until the last step; default 0")
      ->check(CLI::Range(0, 64));
  app.add_flag(
      "--no-compare", flags.no_compare,
      "don't measure, for comparison, a memory copy and an AdamW that makes five passes over "
      "memory");
  add_oversubscribe_flag(app, flags.common);
}

double positive_number(const std::string& flag, const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && at == end) return positive(flag, value);
  fail(Category::usage, fmt::format("{} is not a number", flag),
       {.expected = "a finite number above 0", .got = printable(text)});
}

// AdamW divides gradients by the scale, in float32.
float loss_scale_of(double value) {
  const auto scale = static_cast<float>(value);
  if (std::isfinite(scale) && std::isfinite(1 / scale)) return scale;
  fail(Category::usage, "--loss-scale out of range",
       {.expected = "finite in float32, like its inverse", .got = fmt::format("{}", value)});
}

StepTask task_of(const StepFlags& flags, const CLI::App& app) {
  StepTask task = flags.task;
  require_cores(flags.common, task.ranks);
  task.format = state_format_named(flags.format).format;
  const uint64_t params = parse_count(flags.params);
  constexpr uint64_t kMaxParams = uint64_t{1} << 50;
  if (params == 0 || params > kMaxParams)
    fail(Category::usage, "--params out of range", {.expected = "1 to 2^50", .got = flags.params});
  task.params = static_cast<int64_t>(params);
  task.threads = threads_per_rank(flags.common.threads, task.ranks);
  task.grad_dtype = dtype_flag(flags.grad_dtype).value_or(DType::f32);
  if (flags.clip) task.max_norm = positive("--clip", *flags.clip);
  if (app.count("--loss-scale") > 0) {
    const bool is_given = !flags.loss_scale.empty() && !flags.loss_scale[0].empty();
    task.loss_scale =
        loss_scale_of(is_given ? positive_number("--loss-scale", flags.loss_scale[0]) : 65536);
  }
  task.compares = !flags.no_compare;
  return task;
}

}  // namespace

int run_step(const Args& args, const Surroundings& at) {
  CLI::App app("step AdamW with synthetic gradients in rank processes; measures memory and speed",
               "modicum step");
  StepFlags flags;
  add_step_flags(app, flags);
  if (const auto done = parse(app, args, at)) return *done;
  if (!flags.isa.empty()) use_isa(flags.isa);
  const StepTask task = task_of(flags, app);
  const auto budget = budget_in_force(flags.common, 1);
  Progress progress(flags.common, bytes_to_move(task), at);
  const StepReport report = step_in_ranks(task, budget, at.run_ranks,
                                          [&progress](uint64_t bytes) { progress.show(bytes); });
  print_result(
      flags.common, at, [&] { return step_json(report); }, [&] { return step_text(report); });
  return 0;
}

}  // namespace modicum
