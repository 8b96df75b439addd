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
  const PlanReport report = plan_report(files, flags, common.budget);
  if (common.json) {
    fmt::print("{}\n", plan_json(report));
  } else if (!common.quiet) {
    fmt::print("{}", plan_text(report));
  }
  return 0;
}

}  // namespace modicum
