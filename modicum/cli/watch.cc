#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "modicum/cli/output.h"
#include "modicum/cli/verbs.h"
#include "modicum/watch/watch.h"

namespace modicum {
namespace {

// The words before the first `--`, and those after it.
std::pair<Args, Args> split_at_dashes(const Args& args) {
  const auto dashes = std::find(args.begin(), args.end(), "--");
  Args command;
  if (dashes != args.end()) command.assign(dashes + 1, args.end());
  return {{args.begin(), dashes}, command};
}

}  // namespace

int run_watch(const Args& args) {
  CLI::App app(
      "run COMMAND and measure the memory of its whole process tree; exits as COMMAND does, with "
      "128 + signal if it died of one. The summary goes to stderr; with --json one document goes "
      "to stdout, and COMMAND's stdout to stderr",
      "modicum watch");
  CommonFlags flags;
  std::string limit;
  add_common_flags(app, flags);
  app.add_option("--limit", limit,
                 "run COMMAND in a memory cgroup of its own with this limit, swap included");
  const auto [own, command] = split_at_dashes(args);
  if (const auto done = parse(app, own)) return *done;
  if (command.empty()) {
    fail(Category::usage, "no command to watch",
         {.expected = "modicum watch [OPTIONS] -- COMMAND [ARGUMENTS...]"});
  }
  WatchTask task{.command = command,
                 .is_stdout_for_us = flags.json,
                 .restore_signals = restore_signal_actions};
  if (!limit.empty()) {
    task.limit_bytes = parse_size(limit);
    if (*task.limit_bytes == 0) fail(Category::usage, "--limit must be above 0");
  }
  PosixFileSystem files;
  const WatchRecord record = watch_command(task, files);
  if (flags.json) {
    print(watch_json(record) + "\n");
    if (record.killed) print_error(fmt::format("modicum: {}\n", killed_text(record)));
  } else if (!flags.quiet || record.killed) {
    print_error(flags.quiet ? fmt::format("modicum: {}\n", killed_text(record))
                            : watch_text(record));
  }
  return record.exit_code;
}

}  // namespace modicum
