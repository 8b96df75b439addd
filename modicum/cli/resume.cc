#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <utility>

#include "modicum/cli/resuming.h"

namespace modicum {
namespace {

// The path of the recipe with which the state was saved; empty if the parameters are the stored
// tensors.
std::string recipe_of_state(const RunCheckpoint& found) {
  const std::string name = join_path(kStateDirectory, kStateRecipeFile);
  for (const CheckpointFile& file : found.record.files) {
    if (file.name == name) return join_path(found.path, name);
  }
  return "";
}

// Resumes from a checkpoint and describes it in the report.
LoadReport resume_from(const Surroundings& at, const CommonFlags& common, const RunFlags& flags,
                       RunCheckpoint found, const ResumeSteps& then) {
  ResumedCheckpoint resumed{found.step, found.path, {}};
  LoadReport report = resume_checkpoint(at, common, flags, std::move(found), then);
  report.resumed = std::move(resumed);
  return report;
}

// Resumes from the newest checkpoint of `flags.directory` that proves intact; values are compared
// only while they are loaded. Each checkpoint is planned against the same budget. If another
// process removes the checkpoint meanwhile, chooses once more.
LoadReport resume_newest(const Surroundings& at, const CommonFlags& common, const RunFlags& flags,
                         const ResumeSteps& then) {
  std::vector<SkippedCheckpoint> skipped;
  for (bool is_again = false;;) {
    RunCheckpoint found = newest_checkpoint(at.files, flags.directory, skipped);
    const int64_t number = found.step;
    const std::string path = found.path;
    try {
      LoadReport report = resume_from(at, common, flags, std::move(found), then);
      for (const SkippedCheckpoint& skipped_checkpoint : skipped)
        report.resumed->skipped.push_back({skipped_checkpoint.step, skipped_checkpoint.reason});
      return report;
    } catch (const Error& error) {
      const bool is_bad = is_damage(error.category());
      if (!is_again && (is_bad || error.category() == Category::io) && !at.files.entry(path)) {
        is_again = true;
        skipped.clear();
        continue;
      }
      if (!is_bad) throw;
      skipped.push_back({number, error.what()});
    }
  }
}

}  // namespace

void take_state(const Surroundings& at, const RunCheckpoint& found, RunFlags& flags,
                std::optional<ResumeState>& state) {
  state.emplace(at.files, found);
  if (flags.optimizer.empty()) {
    flags.optimizer = fmt::format("adamw:{}", row_of(state->facts.format).name);
  }
  flags.without_state = state->facts.without_state;
  if (flags.recipe.empty()) flags.recipe = recipe_of_state(found);
}

LoadReport resume_checkpoint(const Surroundings& at, const CommonFlags& common, RunFlags flags,
                             RunCheckpoint found, const ResumeSteps& then) {
  if (then.steps > 0 && flags.optimizer == "none") {
    fail(Category::usage, "--steps needs an optimizer",
         {.expected = "--optimizer adamw:FORMAT", .got = "--optimizer none"});
  }
  const bool has_state = !found.record.state.empty();
  found.record.tensors = found.record.state = {};  // opened again with the files
  flags.directory = found.path;
  std::optional<ResumeState> state;
  if (has_state && flags.optimizer != "none") {
    take_state(at, found, flags, state);
  } else if (flags.optimizer.empty()) {
    flags.optimizer = "none";
  }
  if (!state && (then.steps > 0 || flags.optimizer != "none")) {
    fail(Category::mismatch, "the checkpoint has no optimizer state",
         {.file = base_name(found.path)});
  }
  return within_budget(
      at, common, flags,
      [&](const LoadTask& task, ShowBytes show) {
        const ResumeState* const from = state ? &*state : nullptr;
        return resume_in_ranks({task, from, then.steps, then.max_norm}, show);
      },
      [&](Run& opened) {
        if (state) opened.options.resume = state->footprint(opened);
      });
}

int run_resume(const Args& args, const Surroundings& at) {
  CLI::App app(
      "load the newest intact checkpoint of a ROOT, or a given one, into rank processes, with the "
      "optimizer state that was saved in it",
      "modicum resume");
  CommonFlags common;
  RunFlags run;
  int steps = 0;
  run.optimizer.clear();  // default: the saved optimizer
  add_run_flags(app, run);
  app.get_option("DIR")->description(
      "a saved checkpoint, or a ROOT, of which the newest intact checkpoint is loaded; "
      "damaged ones are skipped");
  app.add_option("--steps", steps, "optimizer steps after the load; default 0")
      ->check(CLI::Range(0, 1000000000));
  add_common_flags(app, common, {.staging = &run.staging});
  add_rare_run_flags(app, run, common);
  if (const auto done = parse(app, args, at)) return *done;
  require_host_memory(run, "resume");
  const bool is_single = at.files.exists(join_path(run.directory, "COMMIT"));
  const ResumeSteps then{.steps = steps};
  const LoadReport report =
      is_single ? resume_from(at, common, run, check_run_checkpoint(at.files, run.directory), then)
                : resume_newest(at, common, run, then);
  print_result(
      common, at, [&] { return load_json(report); }, [&] { return load_text(report); });
  return 0;
}

}  // namespace modicum
