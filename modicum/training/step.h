// What the verb `step` is made of: the run that its flags mean, a rank's life, the baselines.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"
#include "modicum/report/report.h"
#include "modicum/training/gradients.h"

namespace modicum {

// One parameter of `params` elements, cut for the ranks where buckets end.
struct StepRun {
  StateFormat format = StateFormat::fp32;
  int64_t params = 0;
  int ranks = 1;
  int threads = 1;  // per rank
  int steps = 5;
  uint64_t seed = 0;
  std::optional<double> max_norm;
  std::optional<float> loss_scale;  // the first one
  DType grad_dtype = DType::f32;
  int children = 0;  // forked by each rank
  bool compares = true;

  const StateFormatRow& row() const noexcept { return row_of(format); }
  AdamWSpec spec(int rank) const;
};

// Each thread's slots of the ring through which a whole master's low-precision copy leaves.
constexpr int kSlotsPerThread = 2;
uint64_t ring_bytes(const StepRun& run) noexcept;

// Of every rank before and while it steps.
Promise promise_of(const StepRun& run);

// Seconds of each round, all ranks at work at the same time: a plain copy; the step as five passes
// over fp32 state (unscale, norm, clip, Adam, cast to bf16); and the fused pass in the run's format
// over as many parameters.
struct Baselines {
  static constexpr int kRounds = 7;
  std::array<double, kRounds> copy_s{};
  std::array<double, kRounds> unfused_s{};
  std::array<double, kRounds> fused_s{};
  uint64_t copied_bytes = 0;  // read and written, of this rank
};
// How many parameters of rank `rank` they use: as many as fit into the memory of the state.
int64_t baseline_params(const StepRun& run, int rank);
Footprint baseline_footprint(const StepRun& run, int rank);
// All memory is given back when it returns.
Baselines measure_baselines(const StepRun& run, int rank, Ledger& ledger,
                            const std::function<void()>& line_up, Clock& clock);

// What a rank found. Plain data: it crosses from the rank's process.
struct StepOutcome {
  uint64_t fixed_bytes = 0;  // of this rank and its children, rank 0 with the launcher
  std::array<uint64_t, 2> kernel_bytes{};  // the same at step 1 and since, at their highest
  std::array<uint64_t, 2> ledger_bytes{};  // of the state
  Baselines baselines;
  double step_s = 0;  // rank 0: the median over the last steps of the slowest rank's
  GradNorm norm;      // of the last step, over all ranks
  float unscale = 1;  // that the last step has used
  LossScale loss_scale;
  int32_t skipped_steps = 0;
  StateDigest digest;  // this rank's part
};

struct StepRank {
  const StepRun& run;
  const Promise& promise;
  Clock& clock;
  SharedBoard& board;
  const StepLanes& lanes;
};
void be_step_rank(const StepRank& of, int rank);

}  // namespace modicum
