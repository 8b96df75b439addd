#include "modicum/training/training.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "modicum/cli/verbs.h"
#include "modicum/kernels/kernels.h"
#include "modicum/probe/probe.h"

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
  StepRun run;
};

void add_step_flags(CLI::App& app, StepFlags& flags) {
  add_common_flags(app, flags.common);
  add_oversubscribe_flag(app, flags.common);
  app.add_option("--params", flags.params, "parameters, of all ranks together; default 100M");
  app.add_option("--state-format", flags.format, format_names() + "; default fp32");
  app.add_option("--ranks", flags.run.ranks, "rank processes; default 1")
      ->check(CLI::Range(1, 4096));
  app.add_option("--steps", flags.run.steps, "default 5")->check(CLI::Range(1, 1000000000));
  add_seed(app, flags.run.seed, "of parameters, gradients and random bits");
  app.add_option("--clip", flags.clip, "the most that the gradient's norm may be");
  app.add_option("--loss-scale", flags.loss_scale,
                 "scale gradients as torch.amp.GradScaler does; from 65536, or the value given")
      ->expected(0, 1);
  app.add_option("--grad-dtype", flags.grad_dtype,
                 "float32, bfloat16 or float16: what gradients are rounded to as they arrive");
  app.add_option("--isa", flags.isa,
                 fmt::format("{}; default: the first", fmt::join(isas(), ", ")));
  app.add_option("--fork-children", flags.run.children,
                 "processes that each rank forks and that live until the last step")
      ->check(CLI::Range(0, 64));
  app.add_flag("--no-compare", flags.no_compare, "without the copy and the five unfused passes");
}

double number_of(const std::string& flag, const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end) value = 0;
  return positive(flag, value);
}

StepRun run_of(const StepFlags& flags, const CLI::App& app) {
  StepRun run = flags.run;
  require_cores(flags.common, run.ranks);
  run.format = state_format_named(flags.format).format;
  const uint64_t params = parse_count(flags.params);
  constexpr uint64_t kMostParams = uint64_t{1} << 50;
  if (params == 0 || params > kMostParams) fail(Category::usage, "--params: 1 to 2^50");
  run.params = static_cast<int64_t>(params);
  run.threads = threads_per_rank(flags.common, run.ranks);
  run.grad_dtype = dtype_flag(flags.grad_dtype).value_or(DType::f32);
  if (flags.clip) run.max_norm = positive("--clip", *flags.clip);
  if (app.count("--loss-scale") > 0) {
    const bool is_given = !flags.loss_scale.empty() && !flags.loss_scale[0].empty();
    run.loss_scale =
        static_cast<float>(is_given ? number_of("--loss-scale", flags.loss_scale[0]) : 65536);
  }
  run.compares = !flags.no_compare;
  return run;
}

double median(std::array<double, Baselines::kRounds> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// A round lasts as long as its slowest rank.
void compare(StepReport& report, const std::vector<StepOutcome>& outcomes) {
  Baselines slowest;
  const auto raise = [](auto& of, const auto& by) {
    for (size_t i = 0; i < of.size(); ++i) of[i] = std::max(of[i], by[i]);
  };
  for (const StepOutcome& outcome : outcomes) {
    raise(slowest.copy_s, outcome.baselines.copy_s);
    raise(slowest.unfused_s, outcome.baselines.unfused_s);
    raise(slowest.fused_s, outcome.baselines.fused_s);
    slowest.copied_bytes += outcome.baselines.copied_bytes;
  }
  report.copy_bytes_per_s = static_cast<double>(slowest.copied_bytes) / median(slowest.copy_s);
  report.speedup_vs_unfused = median(slowest.unfused_s) / median(slowest.fused_s);
}

StepReport report_of(const StepRun& run, const Promise& promise, const SharedBoard& board) {
  std::vector<StepOutcome> outcomes;
  for (int rank = 0; rank < run.ranks; ++rank) outcomes.push_back(posted<StepOutcome>(board, rank));
  const StepOutcome& first = outcomes[0];
  StepReport report{.format = run.format,
                    .params = run.params,
                    .threads = run.threads,
                    .steps = run.steps,
                    .skipped_steps = first.skipped_steps,
                    .seed = run.seed,
                    .grad_dtype = run.grad_dtype,
                    .isa = std::string(isa()),
                    .children = run.children,
                    .promise = promise,
                    .max_norm = run.max_norm};
  for (const std::string_view name : isas_not_run()) report.isas_not_run.emplace_back(name);
  StateDigest digest;
  std::array<int64_t, 2> kernel{}, ledger{};
  for (const StepOutcome& outcome : outcomes) {
    digest += outcome.digest;
    report.fixed_bytes += outcome.fixed_bytes;
    for (size_t i = 0; i < kernel.size(); ++i) {
      kernel[i] += static_cast<int64_t>(outcome.kernel_bytes[i] - outcome.fixed_bytes);
      ledger[i] += static_cast<int64_t>(outcome.ledger_bytes[i]);
    }
  }
  const auto per_param = [&](size_t i) {
    const auto params = static_cast<double>(run.params);
    return HeldPerParam{static_cast<double>(ledger[i]) / params,
                        static_cast<double>(kernel[i]) / params};
  };
  report.step_1 = per_param(0);
  report.last_step = per_param(1);
  report.state_digest = digest.state;
  report.master_digest = digest.master;
  report.bytes_per_param_moved = bytes_moved_per_parameter(run.format, ring_bytes(run) > 0);
  report.step_s = first.step_s;
  if (run.compares) compare(report, outcomes);
  if (first.norm.finite) report.grad_norm = first.norm.norm(first.unscale);
  if (run.loss_scale) report.loss_scale = first.loss_scale.scale;
  return report;
}

StepReport step_with_ranks(const StepRun& run, const CommonFlags& common) {
  const auto budget = budget_in_force(common, 1);
  const Promise promise = promise_of(run);
  if (budget) require_fits(promise, *budget);
  SteadyClock clock;
  SharedBoard board(run.ranks, clock);
  const StepLanes lanes(run.ranks);
  const double moved = bytes_moved_per_parameter(run.format, ring_bytes(run) > 0);
  Progress progress(
      common, static_cast<uint64_t>(moved * static_cast<double>(run.params) * run.steps), clock);
  const StepRank of{run, promise, clock, board, lanes};
  run_ranks(
      board, clock, [&of](int rank) { be_step_rank(of, rank); }, watching(board, progress));
  StepReport report = report_of(run, promise, board);
  report.budget = budget;
  return report;
}

}  // namespace

int run_step(const Args& args) {
  CLI::App app("AdamW over made-up gradients in real rank processes: what it holds, how fast it is",
               "modicum step");
  StepFlags flags;
  add_step_flags(app, flags);
  if (const auto done = parse(app, args)) return *done;
  if (!flags.isa.empty()) use_isa(flags.isa);
  const StepReport report = step_with_ranks(run_of(flags, app), flags.common);
  print_result(
      flags.common, [&] { return step_json(report); }, [&] { return step_text(report); });
  return 0;
}

}  // namespace modicum
