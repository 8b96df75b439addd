#include <CLI/CLI.hpp>

#include <optional>

#include "modicum/cli/resuming.h"
#include "modicum/cli/watch_instead.h"

namespace modicum {
namespace {

struct RehearseFlags {
  CommonFlags common;
  RunFlags run;
  int steps = 3;
  uint64_t seed = 0;
  std::optional<double> clip;
  std::string save;
  std::optional<int> resume_ranks;
  std::string report;
};

// The flags of the resumed run: those of this run, with `resume_ranks` ranks. The checkpoint has
// its own recipe, since the recipe of this run names the tensors of another checkpoint. If the
// number of ranks changes, the sizes of a mesh no longer multiply to it; a run with a mesh then
// resumes with the default layout.
RunFlags resumed_flags(const RehearseFlags& flags) {
  RunFlags resumed = flags.run;
  resumed.ranks = *flags.resume_ranks;
  resumed.recipe.clear();
  resumed.threads = flags.common.threads;
  const bool has_mesh = !resumed.mesh.empty() || !resumed.expert_mesh.empty();
  if (resumed.ranks == flags.run.ranks || !has_mesh) return resumed;
  const RunFlags defaults;
  resumed.layout = defaults.layout;
  for (std::string RunFlags::*flag :
       {&RunFlags::mesh, &RunFlags::expert_mesh, &RunFlags::tp_rowwise, &RunFlags::tp_packed,
        &RunFlags::tp_replicate, &RunFlags::experts}) {
    resumed.*flag = defaults.*flag;
  }
  return resumed;
}

uint64_t highest_peak(const Plan& plan) {
  const std::vector<uint64_t> peaks = plan.promise.node_peaks();
  return *std::max_element(peaks.begin(), peaks.end());
}

// Called before the load. Throws BUDGET if the resumed run would not fit, naming the need of the
// run that needs more; USAGE if it has too many ranks, and UNSUPPORTED if its layout can't read the
// state.
void require_resumable(const RehearseFlags& flags, const Run& run, const StateFiles& state) {
  const RunFlags second_flags = resumed_flags(flags);
  require_cores(flags.common, second_flags.ranks);
  const Strategy& strategy = *run.options.strategy;
  const SavePlan plan(run.checkpoint, plan_run(run, strategy, std::nullopt), {});
  const Run resumed = resuming_run(second_flags, run, plan, state);
  const auto budget = budget_in_force(flags.common, nodes_of(second_flags));
  const Plan second = plan_run(resumed, strategy, budget);
  if (!budget || fits(second.promise, *budget)) return;
  const auto first_budget = budget_in_force(flags.common, nodes_of(flags.run));
  const Plan first = plan_run(run, strategy, first_budget);
  if (highest_peak(first) > highest_peak(second)) require_fits(first.promise, *first_budget);
  require_fits(second.promise, *budget);
}

RehearseReport rehearse_with_save(const RehearseFlags& flags, const Surroundings& at) {
  const SaveForm form;
  std::optional<StateFiles> state;
  RehearseReport report = within_budget(
      at, flags.common, flags.run,
      [&](const LoadTask& task, ShowBytes show) {
        const SavePlan plan(task.run.checkpoint, task.plan, form);
        const SaveTask save{.load = task,
                            .plan = plan,
                            .root = flags.save,
                            .step = flags.steps,
                            .state = &*state,
                            .steps = flags.steps,
                            .seed = flags.seed};
        return rehearse_in_ranks({.load = task,
                                  .steps = flags.steps,
                                  .seed = flags.seed,
                                  .max_norm = flags.clip,
                                  .save = &save},
                                 show);
      },
      [&](Run& run) {
        const SaveNeeds model = save_needs_of(run, form);
        state.emplace(run);
        run.options.save = save_footprint_of(model, &*state);
        require_resumable(flags, run, *state);
      });
  state.reset();
  report.add_resumed(resume_checkpoint(at, flags.common, resumed_flags(flags),
                                       open_run_checkpoint(at.files, report.saved->path),
                                       {.steps = 1, .max_norm = flags.clip}));
  return report;
}

RehearseReport rehearse(const RehearseFlags& flags, const Surroundings& at) {
  if (!flags.save.empty()) return rehearse_with_save(flags, at);
  return within_budget(at, flags.common, flags.run, [&flags](const LoadTask& task, ShowBytes show) {
    return rehearse_in_ranks(
        {.load = task, .steps = flags.steps, .seed = flags.seed, .max_norm = flags.clip}, show);
  });
}

void require_equal_digests(const RehearseReport& report) {
  if (!report.saved || report.saved->resumed_digest == report.state_digest) return;
  fail(Category::integrity,
       "the resumed ranks have another state than the ranks that were not interrupted",
       {.file = base_name(report.saved->path),
        .expected = digest_text(report.state_digest),
        .got = digest_text(report.saved->resumed_digest)});
}

}  // namespace

int run_rehearse(const Args& args, const Surroundings& at) {
  CLI::App app(
      "load, then step AdamW with synthetic gradients, within one budget; with --save also save "
      "and resume; shows the memory of each phase",
      "modicum rehearse");
  RehearseFlags flags;
  add_run_flags(app, flags.run);
  app.add_option("--steps", flags.steps, "optimizer steps; default 3")
      ->check(CLI::Range(1, 1000000000));
  app.add_option("--clip", flags.clip, "largest gradient norm; default: no clipping");
  app.option_defaults()->group("Save and resume");
  app.add_option("--save", flags.save,
                 "save a checkpoint there, end the ranks, resume with new ones, make a step")
      ->type_name("ROOT");
  app.add_option("--resume-ranks", flags.resume_ranks,
                 "with --save: the number of ranks that resume; default: that of --ranks")
      ->check(CLI::Range(1, kMaxRanks));
  add_common_flags(app, flags.common, {.staging = &flags.run.staging});
  app.add_option("--report", flags.report, std::string(kReportHelp))->type_name("FILE");
  add_rare_run_flags(app, flags.run, flags.common);
  add_seed(app, flags.seed, "gradients and random bits");
  if (const auto done = parse(app, args, at)) return *done;
  if (flags.clip) positive("--clip", *flags.clip);
  if (!optimizer_flag(flags.run.optimizer)) {
    fail(Category::usage, "rehearse needs --optimizer adamw:FORMAT");
  }
  if (flags.save.empty() && flags.resume_ranks) {
    fail(Category::usage, "--resume-ranks needs --save");
  }
  if (!flags.report.empty()) watch_instead("rehearse", args, flags.report, at.files);
  if (!flags.resume_ranks) flags.resume_ranks = flags.run.ranks;
  const RehearseReport report = rehearse(flags, at);
  require_equal_digests(report);
  print_result(
      flags.common, at, [&] { return rehearse_json(report); },
      [&] { return rehearse_text(report); });
  return 0;
}

}  // namespace modicum
