// The optimizer of a rank process that loads, and its steps. Internal to `training`.
#pragma once

#include <memory>

#include "modicum/training/loading_rank.h"
#include "modicum/training/lock_step.h"

namespace modicum {

// The gradients, the optimizer and the LockStep of a rank process. The referenced objects must
// outlive it.
class TrainedRank {
 public:
  struct Options {
    uint64_t seed = 0;
    std::optional<double> max_norm;
  };
  // Construct after the load. Throws BUDGET or NOMEM.
  TrainedRank(LoadWorld& world, const NormPage& page, int rank, LoadingRank& loading_rank,
              const Options& options)
      : world_(world),
        rank_(rank),
        loading_rank_(loading_rank),
        gradients_(options.seed, world.task.threads, loading_rank.ledger),
        optimizer_(trained_of(world.task.run, world.task.plan, rank, loading_rank.load.shards()),
                   gradients_, loading_rank.ledger, world.task.threads),
        steps_(optimizer_,
               {rank, &world.board, &page, &world.clock, loading_rank.ledger.reporter()},
               {.max_norm = options.max_norm}) {}

  RankOptimizer& optimizer() noexcept { return optimizer_; }
  LockStep& steps() noexcept { return steps_; }
  void cast_masters() {
    optimizer_.cast_masters([this] { world_.board.beat(rank_, 0); });
  }
  // Reads the state of a checkpoint, and gives `pages` its sums. The ranks hold the checkpoint's
  // values.
  void read_state(const ResumeState& from, const ComparedPages& pages) {
    const ReportedPhase phase(loading_rank_.ledger.reporter(), "resume");
    ComparedChunks compared(from.checkpoint.manifest, kStateFolder);
    const auto shards = [this](FunctionRef<void(const HeldShard&)> fn) {
      for_each_held(optimizer_, false, fn);
    };
    loading_rank_.load.outcome().storage_read_bytes += load_state(
        from.source(), shards, {rank_, &world_.board, nullptr, &loading_rank_.ledger}, compared);
    pages.give(rank_, compared);
  }

 private:
  LoadWorld& world_;
  const int rank_;
  LoadingRank& loading_rank_;
  const MadeGradients gradients_;
  RankOptimizer optimizer_;
  LockStep steps_;
};

}  // namespace modicum
