// The common part of the verbs that load. Internal to `cli`.
#pragma once

#include "modicum/cli/verbs.h"
#include "modicum/training/training.h"

namespace modicum {

// Opens the run of `flags`, calls `prepare(run)`, plans the run, and returns the report of
// `carry_out(task, show)`: `task` is a LoadTask, `show(bytes)` displays progress. Throws BUDGET if
// the plan does not fit the budget.
template <typename CarryOut, typename Prepare>
auto within_budget(const Surroundings& at, const CommonFlags& common, RunFlags flags,
                   const CarryOut& carry_out, const Prepare& prepare) {
  flags.threads = common.threads;
  require_cores(common, flags.ranks);
  Run run = open_run(at.files, flags);
  prepare(run);
  const auto budget = budget_in_force(common, nodes_of(flags));
  const Plan plan = plan_run(run, *run.options.strategy, budget);
  if (budget) require_fits(plan.promise, *budget);
  // With full-per-rank and rank0-broadcast every rank reads or receives the complete model, and
  // counts it as progress.
  const int times = plan.strategy().of_reader == Window::none ? 1 : flags.ranks;
  Progress progress(
      common, saturating_mul(run.checkpoint.manifest.data_bytes(), static_cast<uint64_t>(times)),
      at);
  const LoadTask task{.run = run,
                      .plan = plan,
                      .threads = plan.options.threads,
                      .budget_bytes = budget ? budget->bytes : 0,
                      .run_ranks = at.run_ranks};
  auto report = carry_out(task, [&progress](uint64_t bytes) { progress.show(bytes); });
  report.budget = budget;
  return report;
}
template <typename CarryOut>
auto within_budget(const Surroundings& at, const CommonFlags& common, const RunFlags& flags,
                   const CarryOut& carry_out) {
  return within_budget(at, common, flags, carry_out, [](Run&) {});
}

}  // namespace modicum
