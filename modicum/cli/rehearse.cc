#include <CLI/CLI.hpp>

#include <optional>

#include "modicum/cli/within_budget.h"

namespace modicum {
namespace {

struct RehearseFlags {
  CommonFlags common;
  RunFlags run;
  int steps = 3;
  uint64_t seed = 0;
  std::optional<double> clip;
};

}  // namespace

int run_rehearse(const Args& args) {
  CLI::App app("load, then step AdamW with synthetic gradients, within one budget",
               "modicum rehearse");
  RehearseFlags flags;
  add_common_flags(app, flags.common);
  add_run_flags(app, flags.run);
  add_oversubscribe_flag(app, flags.common);
  app.add_option("--steps", flags.steps, "default 3")->check(CLI::Range(1, 1000000000));
  add_seed(app, flags.seed, "of gradients and random bits");
  app.add_option("--clip", flags.clip, "largest gradient norm");
  if (const auto done = parse(app, args)) return *done;
  if (flags.clip) positive("--clip", *flags.clip);
  if (!optimizer_flag(flags.run.optimizer)) {
    fail(Category::usage, "rehearse needs --optimizer adamw:FORMAT");
  }
  const RehearseReport report =
      within_budget(flags.common, flags.run, [&flags](const LoadTask& task, ShowBytes show) {
        return rehearse_in_ranks(
            {.load = task, .steps = flags.steps, .seed = flags.seed, .max_norm = flags.clip}, show);
      });
  print_result(
      flags.common, [&] { return rehearse_json(report); }, [&] { return rehearse_text(report); });
  return 0;
}

}  // namespace modicum
