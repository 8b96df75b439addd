// Load, then steps: the rank processes of `rehearse`.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "modicum/training/loading_rank.h"
#include "modicum/training/lock_step.h"

namespace modicum {
namespace {

// The load, step 1, and all steps after it.
constexpr size_t kPhases = 3;

// The outcome of a rank. Plain data: it crosses from the rank's process.
struct Rehearsed {
  std::array<RankOutcome, kPhases> phases;
  StepsTaken taken;
  uint64_t state_digest = 0;  // this rank's part
  uint64_t model_digest = 0;
};

struct RehearsalWorld : LoadWorld {
  explicit RehearsalWorld(const RehearsalTask& of)
      : LoadWorld(of.load), rehearsal(of), page(of.load.plan.ranks()) {}

  const RehearsalTask& rehearsal;
  const NormPage page;
};

class RehearsalRank {
 public:
  RehearsalRank(RehearsalWorld& world, int rank)
      : world_(world), task_(world.rehearsal), rank_(rank), of_(world, rank) {}

  Rehearsed live() {
    of_.load.load();
    note_held(0, of_.load.outcome());
    of_.load.book_what_stays();
    take_steps();
    outcome_.model_digest =
        digest_of_rank(task_.load.plan, rank_, of_.load.shards(), [this] { of_.load.beat(); });
    return outcome_;
  }

 private:
  void take_steps() {
    const LoadTask& of = task_.load;
    const MadeGradients gradients(task_.seed, of.threads, of_.ledger);
    RankOptimizer optimizer(trained_of(of.run, of.plan, rank_, of_.load.shards()), gradients,
                            of_.ledger, of.threads);
    optimizer.cast_masters([this] { world_.board.beat(rank_, 0); });
    LockStep steps(optimizer, {rank_, &world_.board, &world_.page, &world_.clock},
                   {.max_norm = task_.max_norm});
    const RankOutcome& loaded = of_.load.outcome();
    const RankOutcome stepping{
        .rank = loaded.rank, .pid = loaded.pid, .baseline_bytes = loaded.baseline_bytes};
    for (int step = 1; step <= task_.steps; ++step) {
      steps.step(step);
      if (step == 1) note_held(1, stepping);
    }
    note_held(2, stepping);
    outcome_.taken = steps.finish(task_.steps);
    outcome_.state_digest = optimizer.digest().state;
  }

  // Stores the peaks since the last call. All ranks call it at the same time and wait idle.
  void note_held(size_t phase, const RankOutcome& outcome) {
    world_.board.barrier(rank_);
    outcome_.phases[phase] = outcome;
    outcome_.phases[phase].ledger_peak_bytes = of_.ledger.peak_since_mark();
    outcome_.phases[phase].kernel_peak_bytes = read_process_memory().peak_held();
    world_.board.barrier(rank_);
    of_.ledger.mark();
    reset_peak_rss();
  }

  RehearsalWorld& world_;
  const RehearsalTask& task_;
  const int rank_;
  LoadingRank of_;
  Rehearsed outcome_;
};

// Phases [begin, end) of a promise.
Promise part_of(const Promise& promise, size_t begin, size_t end) {
  Promise part = promise;
  part.phases.erase(part.phases.begin() + static_cast<ptrdiff_t>(end), part.phases.end());
  part.phases.erase(part.phases.begin(), part.phases.begin() + static_cast<ptrdiff_t>(begin));
  return part;
}

}  // namespace

RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show) {
  RehearsalWorld world(task);
  const std::vector<Rehearsed> outcomes = outcomes_of<RehearsalRank>(world, show);
  const Plan& plan = task.load.plan;
  RehearseReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                        .strategy = plan.strategy().name,
                        .format = *task.load.run.optimizer,
                        .promise = plan.promise,
                        .launcher_bytes = read_process_memory().held(),
                        .steps = task.steps,
                        .seed = task.seed,
                        .elapsed_s = world.seconds_until(world.clock.now_ns()),
                        .max_norm = task.max_norm};
  const Promise stepping = part_of(plan.promise, kLoadPhases, plan.promise.phases.size());
  report.phases = {{"load", part_of(plan.promise, 0, kLoadPhases), {}}, {"step_1", stepping, {}}};
  if (task.steps > 1) {
    report.phases.push_back({fmt::format("step_{}", task.steps), stepping, {}});
  }
  for (const Rehearsed& outcome : outcomes) {
    report.load_s = std::max(report.load_s, world.seconds_until(outcome.phases[0].loaded_ns));
    report.state_digest += outcome.state_digest;
    report.model_digest += outcome.model_digest;
    if (outcome.taken.norm.finite) report.grad_norm = outcome.taken.norm.norm();
    for (size_t i = 0; i < report.phases.size(); ++i) {
      report.phases[i].ranks.push_back(outcome.phases[i]);
    }
  }
  return report;
}

}  // namespace modicum
