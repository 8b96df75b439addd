#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <utility>

#include "modicum/cli/resuming.h"

namespace modicum {
namespace {

// The --optimizer of the run; an empty `flag` means the saved one. Throws UNSUPPORTED if the flag
// names another format.
std::string optimizer_of(const StateFacts& facts, const std::string& flag) {
  const std::string saved = "adamw:" + std::string(row_of(facts.format).name);
  const std::string asked = flag.empty() ? saved : flag;
  const std::optional<StateFormat> format = optimizer_flag(asked);
  if (format && *format != facts.format) {
    fail(Category::unsupported, "the state was saved in another format",
         {.expected = saved, .got = asked});
  }
  return asked;
}

// The path of the recipe with which the state was saved; empty if the parameters are the stored
// tensors.
std::string recipe_of_state(const FoundStep& step) {
  const std::string name = join_path(kStateDirectory, kStateRecipeFile);
  for (const StepFile& file : step.record.files) {
    if (file.name == name) return join_path(step.path, name);
  }
  return "";
}

// The step at `root` if `root` is a step's directory, with its files' digests checked; otherwise
// the newest intact step in `root`.
FoundStep step_at(FileSystem& files, const std::string& root, std::vector<SkippedStep>& skipped) {
  if (!files.exists(join_path(root, "COMMIT"))) return newest_step(files, root, skipped);
  FoundStep step = open_step(files, root);
  for (const StepFile& file : step.record.files) check_digest(files, root, file);
  return step;
}

}  // namespace

LoadReport resume_step(const CommonFlags& common, RunFlags flags, FoundStep found,
                       const ResumeSteps& then) {
  if (then.steps > 0 && flags.optimizer == "none") {
    fail(Category::usage, "--steps needs an optimizer",
         {.expected = "--optimizer adamw:FORMAT", .got = "--optimizer none"});
  }
  PosixFileSystem files;
  const bool has_state = !found.record.state.empty();
  found.record.tensors = found.record.state = {};  // opened again with the files
  const FoundStep& step = found;
  flags.directory = step.path;
  std::optional<ResumeState> state;
  if (has_state && flags.optimizer != "none") {
    state.emplace(files, step);
    flags.optimizer = optimizer_of(state->facts, flags.optimizer);
    flags.without_state = state->facts.without_state;
    if (flags.recipe.empty()) flags.recipe = recipe_of_state(step);
  } else if (flags.optimizer.empty()) {
    flags.optimizer = "none";
  }
  if (!state && (then.steps > 0 || flags.optimizer != "none")) {
    fail(Category::mismatch, "the step has no optimizer state", {.file = base_name(step.path)});
  }
  return within_budget(
      common, flags,
      [&](const LoadTask& task, ShowBytes show) {
        const ResumeState* const from = state ? &*state : nullptr;
        return resume_in_ranks({task, from, then.steps, then.max_norm}, show);
      },
      [&](Run& opened) {
        if (!state) return;
        state->files.require_of(opened);
        opened.options.resume = resume_footprint_of(state->checkpoint.manifest, state->files);
      });
}

int run_resume(const Args& args) {
  CLI::App app(
      "load the newest intact step of a ROOT, or a given step, into rank processes, with the "
      "optimizer state that was saved in it",
      "modicum resume");
  CommonFlags common;
  RunFlags run;
  int steps = 0;
  run.optimizer.clear();  // default: the saved optimizer
  add_common_flags(app, common);
  add_run_flags(app, run);
  app.get_option("DIR")->description(
      "a step, or the ROOT of several steps, of which the newest intact one is loaded");
  add_oversubscribe_flag(app, common);
  app.add_option("--steps", steps, "optimizer steps after the load; default 0")
      ->check(CLI::Range(0, 1000000000));
  if (const auto done = parse(app, args)) return *done;
  PosixFileSystem files;
  std::vector<SkippedStep> skipped;
  FoundStep step = step_at(files, run.directory, skipped);
  ResumedStep resumed{step.step, step.path, {}};
  LoadReport report = resume_step(common, run, std::move(step), {.steps = steps});
  report.resumed = std::move(resumed);
  for (const SkippedStep& damaged : skipped) {
    report.resumed->skipped.push_back({damaged.step, damaged.reason});
  }
  print_result(
      common, [&] { return load_json(report); }, [&] { return load_text(report); });
  return 0;
}

}  // namespace modicum
