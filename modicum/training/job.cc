#include "modicum/training/job.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <string>
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

// The runs whose promises are those of a save and of a resume.
struct JobRuns {
  Run saving, resuming;
};

JobRuns job_runs(const RunFlags& flags, Run run) {
  const SaveForm form;
  const StateFiles state(run);
  const Plan loaded = plan_run(run, *run.options.strategy, std::nullopt);
  const SavePlan plan(run.checkpoint, loaded, form);
  Run resuming = resuming_run(flags, run, plan, state);
  run.options.save = save_footprint_of(plan.needs(), &state);
  return {std::move(run), std::move(resuming)};
}

bool is_in(const JobPromise& job, const Budget& budget) {
  return fits(job.save, budget) && fits(job.resume, budget);
}

void add_jobs(const JobRuns& runs, const Run& run, PlanReport& report) {
  for (StrategyReport& strategy_report : report.strategies) {
    const Strategy& strategy = strategy_named(strategy_report.strategy);
    strategy_report.job = {plan_run(runs.saving, strategy, report.budget).promise,
                           plan_run(runs.resuming, strategy, report.budget).promise};
    if (report.budget && &strategy == run.options.strategy)
      report.job_fits = is_in(*strategy_report.job, *report.budget);
  }
}

// To be called in a handler of `error`: throws it again unless it says that a state can't be saved.
void require_no_save(const Error& error) {
  if (error.category() != Category::unsupported && error.category() != Category::mismatch) throw;
}

// A FitsJob. Opens a run once for each dtype and state format, but not the requested one.
class JobFit {
 public:
  explicit JobFit(const std::optional<Budget>& budget) : budget_(budget) {}

  // The runs of the requested run.
  const JobRuns& add(const RunFlags& flags, const Run& run) {
    return runs_[{flags.dtype, flags.optimizer}].emplace(job_runs(flags, run));
  }

  // Also true if no save is predicted.
  bool operator()(const RunFlags& flags, const Run& run, const PlanOptions& options) {
    const std::optional<JobRuns>& runs = runs_of(flags, run);
    if (!runs) return true;
    const auto promise = [&](const Run& job) {
      PlanOptions changed = job.options;
      changed.strategy = options.strategy;
      changed.staging_bytes = options.staging_bytes;
      changed.ranks_per_node = options.ranks_per_node;
      return make_plan(job.checkpoint.manifest, job.recipe, job.layout, changed).promise;
    };
    return is_in({promise(runs->saving), promise(runs->resuming)}, budget_.value());
  }

 private:
  const std::optional<JobRuns>& runs_of(const RunFlags& flags, const Run& run) {
    const auto [at, is_new] = runs_.try_emplace({flags.dtype, flags.optimizer});
    if (!is_new || flags.on_device || flags.optimizer == "none") return at->second;
    try {
      at->second = job_runs(flags, open_run(*run.files, flags, Content::headers));
    } catch (const Error& error) {
      require_no_save(error);
    }
    return at->second;
  }

  const std::optional<Budget>& budget_;
  std::map<std::pair<std::string, std::string>, std::optional<JobRuns>> runs_;
};

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
  std::optional<Budget> budget;
  JobFit fits_job(budget);
  const auto extend = [&](const Run& run, PlanReport& report) {
    budget = report.budget;
    if (!run.optimizer) return;
    if (run.on_device) {
      report.checkpoint.warnings.emplace_back("--device: a save and a resume are not predicted");
      return;
    }
    try {
      add_jobs(fits_job.add(flags, run), run, report);
      if (of_plan.node.is_any()) add_timelines(run, of_plan.node, report);
    } catch (const Error& error) {
      require_no_save(error);
      report.checkpoint.warnings.push_back(
          fmt::format("the memory of a save is not predicted: {}", error.what()));
    }
  };
  return plan_report(files, flags, of_plan, {extend, fits_job});
}

}  // namespace modicum
