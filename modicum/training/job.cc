#include "modicum/training/job.h"

#include <fmt/format.h>

#include <utility>

#include "modicum/training/save_ranks.h"

namespace modicum {
namespace {

void require_node_flags(const RunFlags& flags, const NodeFlags& node) {
  if (!node.is_any()) return;
  if (flags.optimizer == "none") {
    fail(Category::usage, "--reference, --backup and --engine-tp require an optimizer",
         {.expected = "--optimizer adamw:FORMAT", .got = "--optimizer none"});
  }
  if (flags.on_device) {
    fail(Category::unsupported,
         "--reference, --backup and --engine-tp count parameters in host memory",
         {.expected = "no --device", .got = "--device"});
  }
  if (node.engine_tp == 0 || flags.ranks % node.engine_tp == 0) return;
  std::string divisors;
  for (int n = 1; n <= flags.ranks; ++n) {
    if (flags.ranks % n == 0) divisors += fmt::format("{}{}", divisors.empty() ? "" : ", ", n);
  }
  fail(Category::usage, fmt::format("--engine-tp does not divide --ranks {}", flags.ranks),
       {.expected = divisors, .got = fmt::format("{}", node.engine_tp)});
}

// A manifest as it will be opened from the saved checkpoint; the digests are not known yet.
Manifest with_record(Manifest manifest) {
  manifest.recorded.resize(manifest.digest_chunks());
  return manifest;
}

void add_timelines(const Run& run, const NodeFlags& node, PlanReport& report) {
  const uint64_t engine_bytes = run.checkpoint.manifest.data_bytes();
  for (StrategyReport& strategy_report : report.strategies) {
    for (int n = 0; n < strategy_report.promise.nodes(); ++n) {
      strategy_report.timelines.push_back(
          node_timeline(*strategy_report.job, node, engine_bytes, n));
    }
  }
  if (!report.budget) return;
  const auto refusal = refusal_of_timelines(report);
  report.node_fits = !refusal;
  if (refusal) report.wider_refusal = refusal;
}

void add_jobs(const RunFlags& flags, Run run, PlanReport& report) {
  const SaveForm form;
  const StateFiles state(run);
  const Plan loaded = plan_run(run, *run.options.strategy, std::nullopt);
  const SavePlan plan(run.checkpoint, loaded, form);
  const Run resuming = resuming_run(flags, run, plan, state);
  run.options.save = save_footprint_of(run, form, &state);
  for (StrategyReport& strategy_report : report.strategies) {
    const Strategy& strategy = strategy_named(strategy_report.strategy);
    strategy_report.job = {plan_run(run, strategy, report.budget).promise,
                           plan_run(resuming, strategy, report.budget).promise};
    if (!report.budget || &strategy != run.options.strategy) continue;
    report.job_fits = fits(strategy_report.job->save, *report.budget) &&
                      fits(strategy_report.job->resume, *report.budget);
  }
}

}  // namespace

Run resuming_run(const RunFlags& flags, const Run& saving, const SavePlan& plan,
                 const StateFiles& state) {
  Checkpoint planned = saving.checkpoint;
  planned.manifest = with_record(plan.manifest());
  Run run = run_of(*saving.files, flags, std::move(planned), state_recipe_text(plan.plan()));
  const std::vector<StateOf> parameters = state_of(run);
  state.require_of(parameters);
  run.options.resume = resume_footprint_of(with_record(state.manifest()), state, parameters);
  return run;
}

PlanReport job_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan) {
  require_node_flags(flags, of_plan.node);
  return plan_report(files, flags, of_plan, [&](const Run& run, PlanReport& report) {
    if (!run.optimizer) return;
    if (run.on_device) {
      report.checkpoint.warnings.emplace_back("--device: a save and a resume are not predicted");
      return;
    }
    try {
      add_jobs(flags, run, report);
      if (of_plan.node.is_any()) add_timelines(run, of_plan.node, report);
    } catch (const Error& error) {
      const Category why = error.category();
      if (why != Category::unsupported && why != Category::mismatch) throw;
      report.checkpoint.warnings.push_back(
          fmt::format("the memory of a save is not predicted: {}", error.what()));
    }
  });
}

}  // namespace modicum
