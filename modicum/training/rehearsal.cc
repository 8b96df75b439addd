// Load, then steps: the rank processes of `rehearse`.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

#include "modicum/probe/probe.h"
#include "modicum/training/load_ranks.h"
#include "modicum/training/lock_step.h"
#include "modicum/training/rank_load.h"

namespace modicum {
namespace {

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
  StepsTaken taken;
  uint64_t state_digest = 0;  // this rank's parts
  uint64_t model_digest = 0;
};

// What the rank processes share, made before they are forked.
struct RehearsalWorld {
  const RehearsalTask& task;
  SteadyClock& clock;
  SharedBoard& board;
  Rings& rings;
  const NormPage& page;
};

class RehearsalRank {
 public:
  RehearsalRank(const RehearsalWorld& world, int rank)
      : world_(world),
        task_(world.task),
        rank_(rank),
        ledger_(task_.plan.promise.ledger_limit_bytes(rank)) {}

  void live() {
    reset_peak_rss();
    const uint64_t baseline_bytes = read_process_memory().held();
    const std::unique_ptr<Exchange> exchange = world_.rings.end_of(rank_, world_.board);
    RankLoad load({task_.run.checkpoint,
                   task_.plan,
                   {rank_, &world_.board, exchange.get(), &ledger_},
                   world_.clock,
                   {.threads = task_.threads}});
    load.load();
    outcome_.loaded = load.outcome();
    outcome_.loaded.baseline_bytes = baseline_bytes;
    note_held(0);
    load.book_what_stays();
    take_steps(load.shards());
    outcome_.model_digest = digest_of_rank(task_.plan, rank_, load.shards(), [this] {
      world_.board.check();
      world_.board.beat(rank_, 0);
    });
    world_.board.post_value(rank_, outcome_);
    world_.board.barrier(rank_);
  }

 private:
  void take_steps(HostSink& shards) {
    const MadeGradients gradients(task_.seed, task_.threads, ledger_);
    RankOptimizer optimizer(trained_of(task_.run, task_.plan, rank_, shards), gradients, ledger_,
                            task_.threads);
    optimizer.cast_masters([this] { world_.board.beat(rank_, 0); });
    LockStep steps(optimizer, {rank_, &world_.board, &world_.page, &world_.clock},
                   {.max_norm = task_.max_norm});
    for (int step = 1; step <= task_.steps; ++step) {
      steps.step(step);
      if (step == 1) note_held(1);
    }
    note_held(2);
    outcome_.taken = steps.finish(task_.steps);
    outcome_.state_digest = optimizer.digest().state;
  }

  // All ranks at the same time, while nobody works: the most since this was last called.
  void note_held(size_t phase) {
    world_.board.barrier(rank_);
    outcome_.held[phase] = {ledger_.peak_since_mark(), read_process_memory().peak_held()};
    world_.board.barrier(rank_);
    ledger_.mark();
    reset_peak_rss();
  }

  const RehearsalWorld& world_;
  const RehearsalTask& task_;
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

void add_outcome(RehearseReport& report, const Rehearsed& outcome) {
  report.state_digest += outcome.state_digest;
  report.model_digest += outcome.model_digest;
  if (outcome.taken.norm.finite) report.grad_norm = outcome.taken.norm.norm();
  for (size_t i = 0; i < report.phases.size(); ++i) {
    const RankOutcome& loaded = outcome.loaded;
    RankOutcome of_phase{
        .rank = loaded.rank, .pid = loaded.pid, .baseline_bytes = loaded.baseline_bytes};
    if (i == 0) of_phase = loaded;
    of_phase.ledger_peak_bytes = outcome.held[i].ledger_peak_bytes;
    of_phase.kernel_peak_bytes = outcome.held[i].kernel_peak_bytes;
    report.phases[i].ranks.push_back(of_phase);
  }
}

RehearseReport report_of(const RehearsalWorld& world, int64_t begin_ns) {
  const RehearsalTask& task = world.task;
  const Promise& promise = task.plan.promise;
  RehearseReport report{.checkpoint = facts_of(task.run.checkpoint),
                        .strategy = task.plan.strategy().name,
                        .format = *task.run.optimizer,
                        .promise = promise,
                        .launcher_bytes = read_process_memory().held(),
                        .steps = task.steps,
                        .seed = task.seed,
                        .max_norm = task.max_norm};
  const Promise stepping = part_of(promise, kLoadPhases, promise.phases.size());
  report.phases = {{"load", part_of(promise, 0, kLoadPhases), {}}, {"step_1", stepping, {}}};
  if (task.steps > 1) {
    report.phases.push_back({fmt::format("step_{}", task.steps), stepping, {}});
  }
  int64_t loaded_ns = begin_ns;
  for (int rank = 0; rank < task.plan.ranks(); ++rank) {
    const auto outcome = world.board.posted_value<Rehearsed>(rank);
    loaded_ns = std::max(loaded_ns, outcome.loaded.loaded_ns);
    add_outcome(report, outcome);
  }
  report.load_s = static_cast<double>(loaded_ns - begin_ns) / kNsPerSecond;
  report.elapsed_s = static_cast<double>(world.clock.now_ns() - begin_ns) / kNsPerSecond;
  return report;
}

}  // namespace

RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show) {
  SteadyClock clock;
  SharedBoard board(task.plan.ranks(), clock);
  Rings rings(task.plan);
  const NormPage page(task.plan.ranks());
  const RehearsalWorld world{task, clock, board, rings, page};
  const int64_t begin_ns = clock.now_ns();
  run_watched(
      board, clock, [&world](int rank) { RehearsalRank(world, rank).live(); }, show);
  return report_of(world, begin_ns);
}

}  // namespace modicum
