// Optimizer steps of all ranks at the same time. Part of the door of `training`.
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

// The page on which ranks exchange their parts of the norm: shared memory, made before they are
// forked. A rank writes its own lane, and reads the others
// between the line-up after it and the next one.
class NormPage {
 public:
  explicit NormPage(int ranks);

  // A rank's part of the norm and how long its last step took. The two sets of lanes are used in
  // turn, so that one may be written while the other is still read.
  struct Lane {
    GradNorm norm;
    double last_step_s = 0;
  };
  Lane& lane(int64_t step, int rank) const noexcept;
  // Over all ranks, added up in the same order by each, so that all get the same bits.
  GradNorm norm(int64_t step) const noexcept;
  double slowest_s(int64_t step) const noexcept;  // of the last steps
  // Waits for all ranks without sleeping, so that what is timed next begins at the same time. PEER.
  void line_up(const Board& board) const;

 private:
  std::atomic<uint64_t>& arrived() const noexcept;
  const int ranks_;
  Mapping mapping_;
};

// One rank among those that step together. All outlives the LockStep.
struct StepContext {
  int rank = 0;
  Board* board = nullptr;
  const NormPage* page = nullptr;
  Clock* clock = nullptr;
};

struct LockStepOptions {
  std::optional<double> max_norm;
  std::optional<float> loss_scale;  // the first, as torch.amp.GradScaler has it; none: no scaling
  std::span<std::byte> ring;        // through which low-precision copies leave; empty: none do
  uint64_t bytes_of_step = 0;       // of progress
};

// What the steps came to. Plain data.
struct StepsTaken {
  GradNorm norm;      // of the last step, over all ranks
  float unscale = 1;  // that the last step used
  LossScale loss_scale;
  int32_t skipped = 0;  // for a gradient that was not finite
  double step_s = 0;    // the median over the last steps of the slowest rank's; 0: all were skipped
};

// Gradients, the norm over all ranks, clipping, and the step or its skipping. Every rank makes the
// same calls.
class LockStep {
 public:
  LockStep(RankOptimizer& optimizer, const StepContext& at, const LockStepOptions& options);

  // Step 1, 2, ... PEER where another rank has failed.
  void step(int64_t number);
  // After the last step, whose number is given.
  StepsTaken finish(int64_t last);

 private:
  void step_timed();
  void note_time(int64_t step);

  RankOptimizer& optimizer_;
  const StepContext at_;
  const LockStepOptions options_;
  StepsTaken taken_;
  double last_step_s_ = 0;
  // The slowest rank's time of the latest steps.
  std::array<double, 1024> seconds_{};
  int64_t timed_ = 0;
};

}  // namespace modicum
