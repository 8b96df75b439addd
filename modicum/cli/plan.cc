#include <fmt/format.h>

#include "modicum/cli/verbs.h"

namespace modicum {

int run_plan(const Args& args) {
  CLI::App app("who reads what, and what each rank and node will hold; reads headers only",
               "modicum plan");
  CommonFlags common;
  RunFlags flags;
  add_common_flags(app, common);
  add_run_flags(app, flags);
  if (const auto done = parse(app, args)) return *done;
  PosixFileSystem files;
  const Run run = open_run(files, flags);
  PlanReport report{.checkpoint = facts_of(run.checkpoint), .ranks = flags.ranks};
  if (!common.budget.empty()) report.budget = budget_of(common.budget, nodes_of(flags));
  for (const Strategy& strategy : strategies()) {
    Plan plan = plan_run(run, strategy, report.budget);
    if (report.budget && &strategy == run.options.strategy) {
      report.fits = fits(plan.promise, *report.budget);
    }
    const Traffic sent = traffic(plan);
    report.strategies.push_back({strategy.name, std::move(plan.promise), sent});
  }
  if (common.json) {
    fmt::print("{}\n", plan_json(report));
  } else if (!common.quiet) {
    fmt::print("{}", plan_text(report));
  }
  return 0;
}

}  // namespace modicum
