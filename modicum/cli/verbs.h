// The verbs of the command line, and what they share.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/report/report.h"
#include "modicum/runs/runs.h"

namespace CLI {
class App;
}  // namespace CLI

namespace modicum {

using Args = std::vector<std::string>;

struct Verb {
  std::string_view name;
  std::string_view help;
  int (*run)(const Args& args);  // what stands behind the verb; the exit code. Throws Error.
};
std::span<const Verb> verbs() noexcept;

int run_inspect(const Args& args);
int run_synth(const Args& args);
int run_plan(const Args& args);
int run_load(const Args& args);
int run_rehearse(const Args& args);
int run_step(const Args& args);

// What every verb takes.
struct CommonFlags {
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  int threads = 0;  // 0: the usable CPUs (of `load`, divided by the ranks)
  std::string budget;
  std::string progress = "auto";
  bool oversubscribe = false;  // of verbs with ranks
};
void add_common_flags(CLI::App& app, CommonFlags& flags);

void add_run_flags(CLI::App& app, RunFlags& flags);
std::string format_names();  // of the state formats, for help
// --seed; USAGE, where the verb's flags are parsed, for what is no whole number of 64 bits.
void add_seed(CLI::App& app, uint64_t& seed, const std::string& of);
// The number after `flag`; USAGE where it is not above 0.
double positive(const std::string& flag, double value);

// The budget per node that a run is held to: that of the flag, else `auto`.
std::optional<Budget> budget_in_force(const CommonFlags& flags, int nodes);
void add_oversubscribe_flag(CLI::App& app, CommonFlags& flags);
// For verbs that start rank processes: USAGE where there are too many for the machine's cores.
void require_cores(const CommonFlags& flags, int ranks);
// Threads of each of so many rank processes on this machine.
int threads_per_rank(const CommonFlags& flags, int ranks);
// What a verb has to say, on stdout: one of the two, or nothing.
void print_result(const CommonFlags& flags, FunctionRef<std::string()> json,
                  FunctionRef<std::string()> text);

// Parses; prints help and returns 0, or nothing to go on. USAGE, with the nearest name, on an
// unknown flag; USAGE on an empty value.
std::optional<int> parse(CLI::App& app, const Args& args);

// For verbs that hold little: BUDGET where `bytes` for `purpose` and the process itself don't fit.
void require_budget(const CommonFlags& flags, Purpose purpose, uint64_t bytes);

// `auto` is a line rewritten where stderr is a terminal, and nothing else.
class Progress {
 public:
  Progress(const CommonFlags& flags, uint64_t total_bytes);
  ~Progress();
  void show(uint64_t bytes);

 private:
  enum class Mode { none, plain, rewritten };
  Mode mode_ = Mode::none;
  const uint64_t total_bytes_;
  SteadyClock clock_;
  const int64_t begin_ns_;
  int64_t next_ns_ = 0;
  bool shown_ = false;
};

}  // namespace modicum
