// The optimizer on its own, in rank processes of this machine. Part of the door of `training`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/report/report.h"
#include "modicum/training/rank_processes.h"

namespace modicum {

// Steps over one parameter of `params` elements, cut for the ranks where buckets end.
struct StepTask {
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
};

// Bytes that all steps together must read and write.
uint64_t bytes_to_move(const StepTask& task) noexcept;

// Errors as run_ranks'; BUDGET before a rank is started.
StepReport step_in_ranks(const StepTask& task, const std::optional<Budget>& budget, ShowBytes show);

}  // namespace modicum
