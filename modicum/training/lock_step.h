// Optimizer steps of all ranks in lock step. Part of the public header of `training`.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "modicum/memory/memory.h"
#include "modicum/ranks/ranks.h"
#include "modicum/training/optimizer.h"

namespace modicum {

// Shared memory in which ranks exchange their parts of the gradient norm. Construct it before the
// fork. In each step a rank writes its lane and calls line_up. It may then read all lanes of this
// step until its next line_up.
class NormPage {
 public:
  explicit NormPage(int ranks);

  // A rank's part of the norm and the duration of its last step. Odd and even steps have their own
  // lanes, so that a fast rank can write while a slow one still reads.
  struct Lane {
    GradNorm norm;
    double last_step_s = 0;
  };
  Lane& lane(int64_t step, int rank) const noexcept;
  // The norm over all ranks, summed in rank order, so that every rank gets the same bits.
  GradNorm norm(int64_t step) const noexcept;
  double slowest_s(int64_t step) const noexcept;  // maximum of last_step_s over all ranks
  // A barrier that spins, so that all ranks leave it at nearly the same time. Throws PEER.
  void line_up(const Board& board) const;

 private:
  std::atomic<uint64_t>& arrived() const noexcept;
  const int ranks_;
  Mapping mapping_;
};

// One rank and its connections. All must outlive the LockStep.
struct StepContext {
  int rank = 0;
  Board* board = nullptr;
  const NormPage* page = nullptr;
  Clock* clock = nullptr;
  Reporter reporter;  // receives the steps as phases
};

struct LockStepOptions {
  std::optional<double> max_norm;
  std::optional<float> loss_scale;  // initial, as in torch.amp.GradScaler; empty: no scaling
  std::span<std::byte> ring;        // for low-precision copies of an fp32 master; empty: no copies
  uint64_t bytes_of_step = 0;       // bytes that each step adds to the board's progress
};

// The outcome of the steps. Plain data, since it is sent from the rank's process.
struct StepsTaken {
  GradNorm norm;      // norm of the last step's gradients, over all ranks
  float unscale = 1;  // factor that undoes the last step's loss scale
  LossScale loss_scale;
  int32_t skipped = 0;  // steps with a gradient that was not finite
  // The slowest rank's time per step: the median over the last 1024 steps that were not skipped; 0
  // if all were skipped.
  double step_s = 0;
};

// A training step: gradients, the norm over all ranks, clipping, then AdamW's step, which is
// skipped if the norm is not finite. Every rank makes the same calls.
class LockStep {
 public:
  LockStep(RankOptimizer& optimizer, const StepContext& at, const LockStepOptions& options);

  // Steps are numbered from 1. Throws PEER if another rank failed.
  void step(int64_t number);
  // Call once after the last step, with its number.
  StepsTaken finish(int64_t last);
  const StepsTaken& taken() const noexcept { return taken_; }  // without step_s

 private:
  void step_timed();
  void note_time(int64_t step);

  RankOptimizer& optimizer_;
  const StepContext at_;
  const LockStepOptions options_;
  StepsTaken taken_;
  double last_step_s_ = 0;
  // The slowest rank's times of the last 1024 steps that were not skipped.
  std::array<double, 1024> seconds_{};
  int64_t timed_ = 0;
};

}  // namespace modicum
