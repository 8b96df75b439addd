#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "modicum/cli/verbs.h"
#include "modicum/probe/probe.h"
#include "modicum/training/training.h"

namespace modicum {
namespace {

struct RehearseFlags {
  CommonFlags common;
  RunFlags run;
  int steps = 3;
  uint64_t seed = 0;
  std::optional<double> clip;
};

// The load, step 1, and all steps after it.
constexpr size_t kPhases = 3;

// What a rank found. Plain data: it crosses from the rank's process.
struct Rehearsed {
  RankOutcome loaded;
  struct Held {
    uint64_t ledger_peak_bytes = 0;
    uint64_t kernel_peak_bytes = 0;
  };
  std::array<Held, kPhases> held;
  GradNorm norm;              // of the last step, over all ranks
  uint64_t state_digest = 0;  // this rank's parts
  uint64_t model_digest = 0;
};

// What the rank processes run, made before they are forked.
struct RehearseRun {
  const RehearseFlags& flags;
  const Run& run;
  const Plan& plan;
  Clock& clock;
  SharedBoard& board;
  Rings& rings;
  const StepLanes& lanes;
  int threads;
};

// One rank's life.
class Rehearsal {
 public:
  Rehearsal(const RehearseRun& of, int rank)
      : of_(of), rank_(rank), ledger_(of.plan.promise.ledger_limit_bytes(rank)) {}

  void run() {
    outcome_.loaded = {.rank = rank_, .pid = static_cast<int32_t>(getpid())};
    reset_peak_rss();
    outcome_.loaded.baseline_bytes = read_process_memory().held();
    const std::unique_ptr<Exchange> exchange = of_.rings.end_of(rank_, of_.board);
    HostSink shards(of_.plan, rank_, ledger_);
    note(outcome_.loaded, load(of_.run.checkpoint, of_.plan, {rank_, &of_.board, exchange.get()},
                               shards, ledger_, {.threads = of_.threads}));
    outcome_.loaded.loaded_ns = of_.clock.now_ns();
    look(0);
    const auto alive = [this] { of_.board.beat(rank_, 0); };
    Training training(of_.run, of_.plan, rank_, shards, ledger_, of_.threads, of_.flags.seed);
    training.begin(alive);
    for (int step = 1; step <= of_.flags.steps; ++step) {
      make_step(training, step, alive);
      if (step == 1) look(1);
    }
    look(2);
    outcome_.state_digest = training.digest().state;
    outcome_.model_digest = digest_of_rank(of_.plan, rank_, shards, [&] {
      of_.board.check();
      alive();
    });
    of_.board.post(rank_, std::as_bytes(std::span(&outcome_, 1)));
    of_.board.barrier(rank_);
  }

 private:
  // All ranks look while nobody works, each at what it has held since it last did.
  void look(size_t phase) {
    of_.board.barrier(rank_);
    outcome_.held[phase] = {ledger_.peak_since_mark(), read_process_memory().peak_held()};
    of_.board.barrier(rank_);
    ledger_.mark();
    reset_peak_rss();
  }

  void make_step(Training& training, int step, const std::function<void()>& alive) {
    of_.lanes.lane(step, rank_) = {training.deliver(step, alive)};
    of_.board.barrier(rank_);
    outcome_.norm = of_.lanes.norm(step);
    StepOptions options;
    if (of_.flags.clip) options.clip = clip_factor(outcome_.norm.norm(), *of_.flags.clip);
    training.step(options);
    of_.board.beat(rank_, 0);
  }

  const RehearseRun& of_;
  const int rank_;
  Ledger ledger_;
  Rehearsed outcome_;
};

// The phases that a name of the report stands for.
Promise part_of(const Promise& promise, size_t begin, size_t end) {
  Promise part = promise;
  part.phases.erase(part.phases.begin() + static_cast<ptrdiff_t>(end), part.phases.end());
  part.phases.erase(part.phases.begin(), part.phases.begin() + static_cast<ptrdiff_t>(begin));
  return part;
}

RehearseReport report_of(const RehearseRun& of, const std::optional<Budget>& budget,
                         int64_t begin_ns) {
  const Promise& promise = of.plan.promise;
  RehearseReport report{.checkpoint = facts_of(of.run.checkpoint),
                        .strategy = of.plan.strategy().name,
                        .format = *of.run.optimizer,
                        .promise = promise,
                        .launcher_bytes = read_process_memory().held(),
                        .steps = of.flags.steps,
                        .seed = of.flags.seed,
                        .max_norm = of.flags.clip,
                        .budget = budget};
  const Promise stepping = part_of(promise, kLoadPhases, promise.phases.size());
  report.phases = {{"load", part_of(promise, 0, kLoadPhases), {}}, {"step_1", stepping, {}}};
  if (of.flags.steps > 1) {
    report.phases.push_back({fmt::format("step_{}", of.flags.steps), stepping, {}});
  }
  int64_t loaded_ns = begin_ns;
  for (int rank = 0; rank < of.plan.ranks(); ++rank) {
    const auto outcome = posted<Rehearsed>(of.board, rank);
    loaded_ns = std::max(loaded_ns, outcome.loaded.loaded_ns);
    report.state_digest += outcome.state_digest;
    report.model_digest += outcome.model_digest;
    if (outcome.norm.finite) report.grad_norm = outcome.norm.norm();
    for (size_t i = 0; i < report.phases.size(); ++i) {
      RankOutcome of_phase{
          .rank = rank, .pid = outcome.loaded.pid, .baseline_bytes = outcome.loaded.baseline_bytes};
      if (i == 0) of_phase = outcome.loaded;
      of_phase.ledger_peak_bytes = outcome.held[i].ledger_peak_bytes;
      of_phase.kernel_peak_bytes = outcome.held[i].kernel_peak_bytes;
      report.phases[i].ranks.push_back(of_phase);
    }
  }
  report.load_s = static_cast<double>(loaded_ns - begin_ns) / kNsPerSecond;
  report.elapsed_s = static_cast<double>(of.clock.now_ns() - begin_ns) / kNsPerSecond;
  return report;
}

RehearseReport rehearse_with_ranks(const RehearseFlags& flags) {
  PosixFileSystem files;
  SteadyClock clock;
  require_cores(flags.common, flags.run.ranks);
  const Run run = open_run(files, flags.run);
  if (!run.optimizer) fail(Category::usage, "rehearse needs --optimizer adamw:FORMAT");
  const auto budget = budget_in_force(flags.common, nodes_of(flags.run));
  const Plan plan = plan_run(run, *run.options.strategy, budget);
  if (budget) require_fits(plan.promise, *budget);

  SharedBoard board(plan.ranks(), clock);
  Rings rings(plan);
  const StepLanes lanes(plan.ranks());
  const int threads = threads_per_rank(flags.common, plan.ranks());
  const RehearseRun of{flags, run, plan, clock, board, rings, lanes, threads};
  Progress progress(flags.common, run.checkpoint.manifest.data_bytes(), clock);
  const int64_t begin_ns = clock.now_ns();
  run_ranks(
      board, clock, [&of](int rank) { Rehearsal(of, rank).run(); }, watching(board, progress));
  return report_of(of, budget, begin_ns);
}

}  // namespace

int run_rehearse(const Args& args) {
  CLI::App app("load, then make steps of AdamW with made-up gradients, in one budget",
               "modicum rehearse");
  RehearseFlags flags;
  add_common_flags(app, flags.common);
  add_run_flags(app, flags.run);
  add_oversubscribe_flag(app, flags.common);
  app.add_option("--steps", flags.steps, "default 3")->check(CLI::Range(1, 1000000000));
  add_seed(app, flags.seed, "of gradients and random bits");
  app.add_option("--clip", flags.clip, "the most that the gradient's norm may be");
  if (const auto done = parse(app, args)) return *done;
  if (flags.clip) positive("--clip", *flags.clip);
  const RehearseReport report = rehearse_with_ranks(flags);
  print_result(
      flags.common, [&] { return rehearse_json(report); }, [&] { return rehearse_text(report); });
  return 0;
}

}  // namespace modicum
