#include <CLI/CLI.hpp>

#include <string>

#include "modicum/cli/verbs.h"
#include "modicum/probe/probe.h"

namespace modicum {

int run_doctor(const Args& args, const Surroundings& at) {
  CLI::App app(
      "find limits and settings of this machine that end a training job or cost it memory; with "
      "--pid also examine a running program: the memory that forked children share, how they were "
      "started, malloc's heaps, pinned memory",
      "modicum doctor");
  CommonFlags flags;
  int pid = 0;
  app.add_option(
         "--pid", pid,
         "PID of a running trainer, or of its launcher; reading takes about 0.1 s per GiB of "
         "the memory of processes that have forked")
      ->check(CLI::Range(1, INT32_MAX));
  add_common_flags(app, flags,
                   {.budget_default = "none",
                    .threads = false,
                    .progress = false,
                    .verbose = "also show what each `info` finding advises"});
  if (const auto done = parse(app, args, at)) return *done;
  DoctorFacts facts;
  if (pid > 0) facts.program = read_program(pid);
  facts.limits = memory_limits("", pid);
  facts.oom_kills = oom_kill_count("", pid);
  facts.settings = read_settings(pid);
  if (const auto budget = budget_of(flags.budget.empty() ? "none" : flags.budget, 1)) {
    facts.budget_bytes = budget->bytes;
  }
  print_result(
      flags, at, [&] { return doctor_json(facts); },
      [&] { return doctor_text(facts, flags.verbose); });
  return 0;
}

}  // namespace modicum
