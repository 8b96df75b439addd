#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/cli/output.h"
#include "modicum/cli/result_file.h"
#include "modicum/cli/verbs.h"
#include "modicum/watch/watch.h"

namespace modicum {
namespace {

struct WatchFlags {
  CommonFlags common;
  bool tied = false;
  std::string limit;
  std::string trace;
  std::string report;
  std::vector<std::string> compare;
};

// The arguments before the first `--` and the arguments after it.
std::pair<Args, Args> split_at_dashes(const Args& args) {
  const auto dashes = std::find(args.begin(), args.end(), "--");
  Args command;
  if (dashes != args.end()) command.assign(dashes + 1, args.end());
  return {{args.begin(), dashes}, command};
}

std::optional<ResultFile> file_of(FileSystem& files, std::string_view flag,
                                  const std::string& path) {
  if (path.empty()) return std::nullopt;
  return std::optional<ResultFile>(std::in_place, files, flag, path);
}

int compare(const WatchFlags& flags, const Surroundings& at) {
  auto page = file_of(at.files, "--report", flags.report);
  std::array<std::string, 2> texts;
  std::array<WatchedRun, 2> parsed;
  const bool is_name_enough = base_name(flags.compare[0]) != base_name(flags.compare[1]);
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i] = read_text(*at.files.open(flags.compare[i]), kLongestText, Category::format_limit);
    parsed[i] =
        parse_run(texts[i], is_name_enough ? base_name(flags.compare[i]) : flags.compare[i]);
    std::string& name = parsed[i].name;
    if (name.ends_with(".json")) name.resize(name.size() - std::string_view(".json").size());
  }
  const RunComparison runs{parsed[0], parsed[1]};
  if (page) {
    page->write(
        report_page("Host memory of two runs over time",
                    std::array<PageRun, 2>{{{runs.a.name, texts[0]}, {runs.b.name, texts[1]}}},
                    {.sentence = runs.sentence()}));
  }
  print_result(
      flags.common, at, [&] { return comparison_json(runs); },
      [&] { return comparison_text(runs); });
  return 0;
}

WatchTask task_of(const WatchFlags& flags, const Args& command) {
  WatchTask task{.command = command,
                 .is_stdout_for_us = flags.common.json,
                 .ends_with_us = flags.tied,
                 .restore_signals = restore_signal_actions};
  if (!flags.limit.empty()) {
    task.limit_bytes = parse_size(flags.limit);
    task.limit_text = printable(flags.limit);
    if (*task.limit_bytes == 0) {
      fail(Category::usage, "--limit out of range",
           {.expected = "above 0", .got = printable(flags.limit)});
    }
  }
  return task;
}

int watch(const WatchFlags& flags, const Args& command, const Surroundings& at) {
  const WatchTask task = task_of(flags, command);
  auto trace = file_of(at.files, "--trace", flags.trace);
  auto page = file_of(at.files, "--report", flags.report);
  const WatchRecord record = watch_command(task, at.files);
  int code = record.exit_code;
  // Each result is written even if another one can't be: the command may have run for days.
  const auto attempt = [&code, &at](FunctionRef<void()> write) {
    try {
      write();
    } catch (const Error& error) {
      at.print_error(fmt::format("modicum: {}\n", error.what()));
      code = exit_code(error.category());
    }
  };
  const std::string killed = record.killed ? fmt::format("modicum: {}\n", killed_text(record)) : "";
  if (flags.common.json) {
    attempt([&] { at.print(watch_json(record) + "\n"); });
    at.print_error(killed);
  } else {
    at.print_error(flags.common.quiet ? killed : watch_text(record));
  }
  if (trace) attempt([&] { trace->write(watch_trace(record)); });
  if (page) attempt([&] { page->write(watch_page(record)); });
  return code;
}

}  // namespace

int run_watch(const Args& args, const Surroundings& at) {
  CLI::App app(
      "run COMMAND and measure the memory of its whole process tree. Exits with COMMAND's exit "
      "code, or with 128 + N if signal N ended COMMAND. The summary goes to stderr. With --json, "
      "a JSON document goes to stdout instead, and COMMAND's stdout to stderr",
      "modicum watch");
  WatchFlags flags;
  // Completes the usage line: CLI11 prints this label in brackets after the name.
  app.get_formatter()->label("OPTIONS", "OPTIONS] -- COMMAND [ARGUMENTS...");
  app.option_defaults()->group("Host memory and threads");
  app.add_option("--limit", flags.limit,
                 "limit on the memory of COMMAND's process tree (and on its swap, where "
                 "the kernel accounts for swap), by a memory cgroup that is made for "
                 "the run and removed after it")
      ->type_name("SIZE");
  add_common_flags(app, flags.common, {.budget_default = "", .threads = false, .progress = false});
  app.add_option(
         "--trace", flags.trace,
         "write memory over time, by process and by owner, and the phases to this file, for "
         "Perfetto or Chrome (chrome://tracing); replaces an existing file")
      ->type_name("FILE");
  app.add_option(
         "--report", flags.report,
         "write a chart and tables of memory over time to this HTML file; with --compare, of "
         "both runs")
      ->type_name("FILE");
  app.add_option(
         "--compare", flags.compare,
         "two JSON documents that `watch --json` printed: shows which run held more memory, "
         "when, and of which owner; takes no COMMAND")
      ->expected(2)
      ->type_name("A.json B.json");
  app.option_defaults()->group(kRareFlags);
  app.add_flag("--tied", flags.tied, "kill COMMAND when this process ends; for --report of load");
  const auto [watch_args, command] = split_at_dashes(args);
  if (const auto done = parse(app, watch_args, at)) return *done;
  if (!flags.compare.empty()) {
    if (!command.empty() || !flags.limit.empty() || !flags.trace.empty()) {
      fail(Category::usage, "--compare takes no COMMAND, no --limit and no --trace");
    }
    return compare(flags, at);
  }
  if (command.empty()) {
    fail(Category::usage, "no command to watch",
         {.expected = "modicum watch [OPTIONS] -- COMMAND [ARGUMENTS...]"});
  }
  return watch(flags, command, at);
}

}  // namespace modicum
