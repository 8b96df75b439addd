// The verbs of the command line and their common parts. Internal to `cli`.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/cli/cli.h"
#include "modicum/report/report.h"
#include "modicum/runs/runs.h"

namespace CLI {
class Validator;
class App;
}  // namespace CLI

namespace modicum {

using Args = std::vector<std::string>;

struct Verb {
  std::string_view name;
  std::string_view help;
  // Takes the arguments after the verb; returns the exit code.
  int (*run)(const Args& args, const Surroundings& at);
};
std::span<const Verb> verbs() noexcept;

int run_convert(const Args& args, const Surroundings& at);
int run_diff(const Args& args, const Surroundings& at);
int run_doctor(const Args& args, const Surroundings& at);
int run_inspect(const Args& args, const Surroundings& at);
int run_synth(const Args& args, const Surroundings& at);
int run_plan(const Args& args, const Surroundings& at);
int run_load(const Args& args, const Surroundings& at);
int run_rehearse(const Args& args, const Surroundings& at);
int run_resume(const Args& args, const Surroundings& at);
int run_save(const Args& args, const Surroundings& at);
int run_step(const Args& args, const Surroundings& at);
int run_verify(const Args& args, const Surroundings& at);
int run_watch(const Args& args, const Surroundings& at);

// The flags of every verb.
struct CommonFlags {
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  int threads = 0;  // of each rank process; 0: the usable CPUs, divided by the ranks
  std::string budget;
  std::string progress = "auto";
  bool oversubscribe = false;  // only for verbs with --ranks
};
// The common flags that act in some verbs only. A verb refuses those that would do nothing.
struct ActingFlags {
  std::string_view budget_default = "auto";  // empty: no --budget
  std::string* staging = nullptr;            // the value of --staging; none: no such flag
  bool threads = true;
  bool progress = true;
  std::string_view verbose;  // the help of --verbose; empty: it has no effect
};
// Adds flags in the groups "Host memory and threads" and "Output". To be called after the verb's
// other groups, and before flags in kRareFlags, since the help has the groups in this order.
void add_common_flags(CLI::App& app, CommonFlags& flags, const ActingFlags& acting = {});
void add_adopt_flag(CLI::App& app, bool& adopts);

// The group of flags that only --help-all lists: switches of tests, and flags that few runs need.
constexpr const char* kRareFlags = "Rarely needed";
void add_run_flags(CLI::App& app, RunFlags& flags);
// Those of kRareFlags, with --oversubscribe.
void add_rare_run_flags(CLI::App& app, RunFlags& flags, CommonFlags& common);
// Throws UNSUPPORTED for --destination discard. `verb`: what needs the loaded tensors.
void require_host_memory(const RunFlags& flags, std::string_view verb);
// Adds --seed, an unsigned 64-bit number. `seeded` names what it seeds, for the help text.
void add_seed(CLI::App& app, uint64_t& seed, const std::string& seeded);
// A check that a flag is an integer from `least` to 2^63 - 1. CLI::Range would accept longer ones,
// which CLI11 converts to 2^63 - 1.
CLI::Validator integer_from(int64_t least);
// The bytes of --shard-size; empty if `text` is. Throws USAGE for 0 bytes.
std::optional<uint64_t> shard_size_of(const std::string& text);
// Returns `value`. Throws USAGE unless it is finite and above 0.
double positive(const std::string& flag, double value);

// The budget per node that --budget names, by default `auto`. nullopt: no budget.
std::optional<Budget> budget_in_force(const CommonFlags& flags, int nodes);
void add_oversubscribe_flag(CLI::App& app, CommonFlags& flags);
// Throws USAGE if `ranks` processes are too many for the machine's cores.
void require_cores(const CommonFlags& flags, int ranks);
// With --json prints json() on stdout. Without --json prints text(), unless --quiet is given.
void print_result(const CommonFlags& flags, const Surroundings& at, FunctionRef<std::string()> json,
                  FunctionRef<std::string()> text);

// Parses the flags of a verb. Returns exit code 0 if help was printed, else nullopt. Throws USAGE
// for invalid arguments, empty values and unknown flags. The message about an unknown flag suggests
// a flag with a similar name, if there is one. Help has the flags in groups; --help leaves out
// kRareFlags.
std::optional<int> parse(CLI::App& app, const Args& args, const Surroundings& at);

// For verbs without a plan. Throws BUDGET unless the process and `bytes` for `purpose` fit the
// budget.
void require_budget(const CommonFlags& flags, Purpose purpose, uint64_t bytes);

// Shows progress on stderr: with `--progress plain` a new line every 5 s; with `auto` one line that
// is rewritten, if stderr is a terminal and --quiet is absent.
class Progress {
 public:
  Progress(const CommonFlags& flags, uint64_t total_bytes, const Surroundings& at);
  ~Progress();
  void show(uint64_t bytes);

 private:
  enum class Mode { none, plain, rewritten };
  const Surroundings& at_;
  Mode mode_ = Mode::none;
  const uint64_t total_bytes_;
  SteadyClock clock_;
  const int64_t begin_ns_;
  int64_t next_ns_ = 0;
  bool shown_ = false;
};

}  // namespace modicum
