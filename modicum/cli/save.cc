#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "modicum/cli/resuming.h"

namespace modicum {
namespace {

// --grace in ns. Values above 1e9 s count as 1e9 s.
int64_t grace_ns_of(double seconds) {
  constexpr double kMost = 1e9;
  return static_cast<int64_t>(std::min(positive("--grace", seconds), kMost) * kNsPerSecond);
}

struct SaveFlags {
  CommonFlags common;
  RunFlags run;
  std::string root;
  int64_t step = 0;
  std::string shard_size;
  std::optional<int64_t> keep;
  std::string unused = "copy";
  int steps = 0;
  uint64_t seed = 0;
  std::optional<double> grace;
};

void add_save_flags(CLI::App& app, SaveFlags& flags) {
  add_run_flags(app, flags.run);
  app.add_option("--steps", flags.steps, "optimizer steps before the save; default 0")
      ->check(CLI::Range(0, 1000000000));
  app.option_defaults()->group("The saved checkpoint");
  app.add_option("ROOT", flags.root,
                 "the directory of the run's checkpoints; created if its parent exists")
      ->required();
  app.add_option("--step", flags.step, "the number of the training step: S of ROOT/step-S")
      ->required()
      ->check(integer_from(0));
  app.add_option("--shard-size", flags.shard_size,
                 "largest size of a file's data; default: tensors are divided into files as in DIR")
      ->type_name("SIZE");
  app.add_option("--keep", flags.keep,
                 "intact checkpoints to keep, this one included: after the save, remove all others "
                 "but those with the highest numbers; default: keep all")
      ->check(integer_from(1));
  app.add_option("--unused", flags.unused,
                 "copy (default) or drop the stored tensors that the recipe leaves unused")
      ->check(CLI::IsMember({"copy", "drop"}))
      ->type_name("copy|drop");
  app.add_option("--grace", flags.grace,
                 "seconds that the save may take to finish after SIGTERM, if its rate "
                 "so far shows that it can finish in time; otherwise, and by default, "
                 "it stops at once");
  add_common_flags(app, flags.common, {.staging = &flags.run.staging});
  add_rare_run_flags(app, flags.run, flags.common);
  add_seed(app, flags.seed, "gradients and random bits");
}

// Opens the state of DIR if it is a checkpoint that has one and the save has an optimizer. Returns
// whether it has one. Throws USAGE if `has_seed`, a --seed was given, and it is not the state's
// own.
bool open_state(const Surroundings& at, SaveFlags& flags, bool has_seed,
                std::optional<ResumeState>& from) {
  const std::string& directory = flags.run.directory;
  if (!is_run_checkpoint(at.files, directory)) return false;
  const auto has = [&](const char* name) { return at.files.exists(join_path(directory, name)); };
  // A converted checkpoint, which has no state, may also be called step-N.
  if (step_of(base_name(directory)) && !has("COMMIT") && !has("manifest.json") &&
      !has(kStateDirectory)) {
    return false;
  }
  if (flags.run.optimizer == "none") {
    return at.files.is_directory(join_path(directory, kStateDirectory));
  }
  // The digests are compared when weights and state are opened.
  const RunCheckpoint found = open_run_checkpoint(at.files, directory);
  if (found.record.state.empty()) return false;
  take_state(at, found, flags.run, from);
  const uint64_t seed = from->facts.seed;
  if (has_seed && flags.seed != seed) {
    fail(Category::usage, "--seed: the state of DIR has another one",
         {.expected = fmt::format("{}", seed), .got = fmt::format("{}", flags.seed)});
  }
  flags.seed = seed;
  return true;
}

}  // namespace

int run_save(const Args& args, const Surroundings& at) {
  CLI::App app(
      "load into rank processes and save a checkpoint, ROOT/step-S, completely or not at all",
      "modicum save");
  SaveFlags flags;
  add_save_flags(app, flags);
  if (const auto done = parse(app, args, at)) return *done;
  require_host_memory(flags.run, "save");
  if (flags.steps > 0 && !optimizer_flag(flags.run.optimizer)) {
    fail(Category::usage, "--steps needs --optimizer adamw:FORMAT");
  }
  const int64_t grace_ns = flags.grace ? grace_ns_of(*flags.grace) : 0;
  SaveForm form{.copies_unused = flags.unused == "copy"};
  form.shard_bytes = shard_size_of(flags.shard_size);
  std::optional<ResumeState> from;
  const bool has_state = open_state(at, flags, app.count("--seed") > 0, from);
  std::optional<StateFiles> state;
  const auto state_of = [&state] { return state ? &*state : nullptr; };
  const auto prepare = [&](Run& run) {
    const SaveNeeds model = save_needs_of(run, form);  // whose plan is freed before the state's
    if (run.optimizer) state.emplace(run);
    run.options.save = save_footprint_of(model, state_of());
    if (from) run.options.resume = from->footprint(run);
  };
  SaveReport report = within_budget(
      at, flags.common, flags.run,
      [&](const LoadTask& task, ShowBytes show) {
        const SavePlan plan(task.run.checkpoint, task.plan, form);
        SaveTask save{.load = task,
                      .plan = plan,
                      .root = flags.root,
                      .step = flags.step,
                      .state = state_of(),
                      .from = from ? &*from : nullptr,
                      .steps = flags.steps,
                      .seed = flags.seed,
                      .grace_ns = grace_ns};
        if (flags.keep) save.keep = static_cast<size_t>(*flags.keep);
        return save_in_ranks(save, show);
      },
      prepare);
  if (has_state && !from) {
    report.checkpoint.warnings.push_back(
        "DIR has an optimizer's state, which is not saved again without --optimizer "
        "adamw:FORMAT");
  }
  print_result(
      flags.common, at, [&] { return save_json(report); }, [&] { return save_text(report); });
  return 0;
}

}  // namespace modicum
