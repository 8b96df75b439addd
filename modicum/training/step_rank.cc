#include "modicum/training/step_rank.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/training/children.h"

namespace modicum {
namespace {

class StepRank {
 public:
  StepRank(const StepWorld& world, int rank)
      : world_(world),
        task_(world.task),
        rank_(rank),
        ledger_(world.promise.ledger_limit_bytes(rank)) {}

  void live() {
    if (task_.compares) {
      const auto line_up = [this] {
        world_.board.barrier(rank_);
        world_.page.line_up(world_.board);
      };
      outcome_.baselines =
          measure_baselines({spec_of(task_, rank_), task_.threads, ring_bytes(task_)}, ledger_,
                            line_up, world_.clock);
    }
    const MadeGradients gradients(task_.seed, task_.threads, ledger_);
    const Buffer ring = ledger_.charge(Purpose::staging, ring_bytes(task_));
    world_.board.barrier(rank_);
    outcome_.fixed_bytes = tree_bytes(nullptr);
    fixed_of_ledger_ = ledger_.held().total();
    world_.board.barrier(rank_);
    can_reset_ = reset_peak_rss();
    ledger_.mark();
    RankOptimizer optimizer(trained(), gradients, ledger_, task_.threads);
    optimizer.make_masters();
    take_steps(optimizer, ring.bytes());
    outcome_.digest = optimizer.digest();
    world_.board.post_value(rank_, outcome_);
    world_.board.barrier(rank_);
  }

 private:
  std::vector<Trained> trained() const {
    std::vector<Trained> trained(1);
    trained[0] = {spec_of(task_, rank_), {task_.grad_dtype}, {nullptr}};
    return trained;
  }

  void take_steps(RankOptimizer& optimizer, std::span<std::byte> ring) {
    const AdamWSpec spec = spec_of(task_, rank_);
    LockStep steps(
        optimizer, {rank_, &world_.board, &world_.page, &world_.clock},
        {.max_norm = task_.max_norm,
         .loss_scale = task_.loss_scale,
         .ring = ring,
         .bytes_of_step = static_cast<uint64_t>(bytes_per_param_moved(task_) *
                                                static_cast<double>(spec.shards[0].numel()))});
    const Children children(task_.children);
    for (int step = 1; step <= task_.steps; ++step) {
      // Half-way the loaders of another epoch live beside the first for a step.
      std::optional<Children> more;
      if (step > 1 && step == task_.steps / 2 + 1) more.emplace(task_.children);
      steps.step(step);
      if (step == 1) note_held(0, children);
    }
    note_held(1, children);
    outcome_.taken = steps.finish(task_.steps);
  }

  // What this rank answers for, its highest since it was last noted.
  uint64_t tree_bytes(const Children* children) const {
    const ProcessMemory own = read_process_memory();
    uint64_t sum = children != nullptr && can_reset_ ? own.peak_held() : own.held();
    if (children != nullptr) sum += children->held_bytes();
    if (rank_ == 0) sum += read_process_memory(getppid()).held();
    return sum;
  }

  // All ranks at the same time, while nobody works. At step 1, then of all that followed.
  void note_held(size_t which, const Children& children) {
    world_.board.barrier(rank_);
    outcome_.kernel_bytes[which] = tree_bytes(&children);
    outcome_.ledger_bytes[which] = ledger_.peak_since_mark() - fixed_of_ledger_;
    world_.board.barrier(rank_);
    ledger_.mark();
    static_cast<void>(reset_peak_rss());
  }

  const StepWorld& world_;
  const StepTask& task_;
  const int rank_;
  Ledger ledger_;
  StepOutcome outcome_;
  uint64_t fixed_of_ledger_ = 0;
  bool can_reset_ = false;
};

}  // namespace

void be_step_rank(const StepWorld& world, int rank) { StepRank(world, rank).live(); }

}  // namespace modicum
