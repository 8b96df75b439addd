#include <CLI/CLI.hpp>

#include <optional>

#include "modicum/cli/verbs.h"
#include "modicum/training/training.h"

namespace modicum {
namespace {

struct RehearseFlags {
  CommonFlags common;
  RunFlags run;
  int steps = 3;
  uint64_t seed = 0;
  std::optional<double> clip;
};

RehearseReport rehearse_with_ranks(const RehearseFlags& flags) {
  PosixFileSystem files;
  require_cores(flags.common, flags.run.ranks);
  const Run run = open_run(files, flags.run);
  if (!run.optimizer) fail(Category::usage, "rehearse needs --optimizer adamw:FORMAT");
  const auto budget = budget_in_force(flags.common, nodes_of(flags.run));
  const Plan plan = plan_run(run, *run.options.strategy, budget);
  if (budget) require_fits(plan.promise, *budget);
  Progress progress(flags.common, run.checkpoint.manifest.data_bytes());
  RehearseReport report =
      rehearse_in_ranks({.run = run,
                         .plan = plan,
                         .threads = threads_per_rank(flags.common, plan.ranks()),
                         .steps = flags.steps,
                         .seed = flags.seed,
                         .max_norm = flags.clip},
                        [&progress](uint64_t bytes) { progress.show(bytes); });
  report.budget = budget;
  return report;
}

}  // namespace

int run_rehearse(const Args& args) {
  CLI::App app("load, then make steps of AdamW with made-up gradients, in one budget",
               "modicum rehearse");
  RehearseFlags flags;
  add_common_flags(app, flags.common);
  add_run_flags(app, flags.run);
  add_oversubscribe_flag(app, flags.common);
  app.add_option("--steps", flags.steps, "default 3")->check(CLI::Range(1, 1000000000));
  add_seed(app, flags.seed, "of gradients and random bits");
  app.add_option("--clip", flags.clip, "the most that the gradient's norm may be");
  if (const auto done = parse(app, args)) return *done;
  if (flags.clip) positive("--clip", *flags.clip);
  const RehearseReport report = rehearse_with_ranks(flags);
  print_result(
      flags.common, [&] { return rehearse_json(report); }, [&] { return rehearse_text(report); });
  return 0;
}

}  // namespace modicum
