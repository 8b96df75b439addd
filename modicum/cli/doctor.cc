#include <CLI/CLI.hpp>

#include <string>

#include "modicum/cli/verbs.h"
#include "modicum/probe/probe.h"

namespace modicum {

namespace {

void read_memory(DoctorFacts& facts, int pid, double interval_s) {
  SteadyClock clock;
  facts.program = read_program(pid);
  facts.before = read_tree_kinds(pid);
  const int64_t begin_ns = clock.now_ns();
  clock.sleep_ns(static_cast<int64_t>(interval_s * kNsPerSecond));
  facts.after = interval_s > 0 ? read_tree_kinds(pid) : facts.before;
  if (interval_s > 0) {
    facts.between_s = static_cast<double>(clock.now_ns() - begin_ns) / kNsPerSecond;
  }
}

}  // namespace

int run_doctor(const Args& args, const Surroundings& at) {
  CLI::App app(
      "find limits and settings of this machine that end a training job or cost it memory; with "
      "--pid also examine a running program: the memory that forked children share, how they were "
      "started, the memory of its processes by kind, what grows and how fast, pinned memory",
      "modicum doctor");
  CommonFlags flags;
  int pid = 0;
  CLI::Option* const pid_flag =
      app.add_option(
             "--pid", pid,
             "PID of a running trainer, or of its launcher; reading takes about 0.1 s per GiB of "
             "the memory of processes that have forked")
          ->check(CLI::Range(1, INT32_MAX));
  double interval_s = 2;
  app.add_option("--interval", interval_s,
                 "seconds between two readings of the program's memory, from which its growth is "
                 "computed; 0: one reading")
      ->check(CLI::Range(0.0, 86400.0))
      ->needs(pid_flag);
  add_common_flags(app, flags,
                   {.budget_default = "none",
                    .threads = false,
                    .progress = false,
                    .verbose = "also show what each `info` finding advises"});
  if (const auto done = parse(app, args, at)) return *done;
  DoctorFacts facts;
  if (pid > 0) read_memory(facts, pid, interval_s);
  const int limited = limited_process(facts);
  facts.limits = memory_limits("", limited);
  facts.oom_kills = oom_kill_count("", limited);
  facts.settings = read_settings(limited);
  if (const auto budget = budget_of(flags.budget.empty() ? "none" : flags.budget, 1)) {
    facts.budget_bytes = budget->bytes;
  }
  print_result(
      flags, at, [&] { return doctor_json(facts); },
      [&] { return doctor_text(facts, flags.verbose); });
  return 0;
}

}  // namespace modicum
