// The door of `report`: what was promised beside what happened, as text and as JSON
// (the keys are a contract; more may be added, none renamed).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/plan/plan.h"

namespace modicum {

// What a checkpoint amounts to, for reports.
struct CheckpointFacts {
  uint64_t bytes = 0;  // tensor data
  uint64_t tensors = 0;
  uint64_t files = 0;
  std::vector<std::string> warnings;  // what is optional and broken, unused or odd
};
CheckpointFacts facts_of(const Checkpoint& checkpoint);

// What is in a checkpoint: files, tensors, dtypes, oddities. `verbose`: each tensor a line.
std::string inspect_json(const Checkpoint& checkpoint);
std::string inspect_text(const Checkpoint& checkpoint, bool verbose);

// One strategy's promise, with what it would read and send.
struct StrategyReport {
  std::string_view strategy;
  Promise promise;
  Traffic traffic;
  uint64_t needed_bytes = 0;  // of the stored elements that the ranks' buffers are made of

  // How many times what is needed is read: over 1 where ranks read what others keep, or bytes
  // between strided runs.
  double overread_ratio() const noexcept;
};

// What DeepSpeed itself would hold in host memory for the same training, line by line.
struct DeepSpeedForecast {
  struct Line {
    std::string name;
    std::string_view owner;      // "deepspeed", "fork", "pinned rounding"
    std::string_view phase;      // when it is taken: "init", "step_1", "epoch_2"
    double bytes_per_param = 0;  // of the rank's part of the parameters
    uint64_t bytes = 0;          // of a rank
  };
  struct Ours {
    StateFormat format = StateFormat::fp32;
    uint64_t bytes = 0;  // of a rank
  };
  std::string_view version;  // of DeepSpeed
  int stage = 0;
  uint64_t params = 0;          // of the model
  uint64_t params_of_rank = 0;  // whose optimizer states a rank keeps
  int ranks_of_node = 1;        // of the largest node
  std::vector<Line> lines;
  std::vector<Ours> ours;

  uint64_t bytes_at(std::string_view phase) const noexcept;  // of a rank: it and those before
  uint64_t bytes_of(std::string_view owner) const noexcept;
  double per_param(uint64_t bytes) const noexcept;
};

// The run with some inputs changed, by a plan of its own that fits the budget.
struct Alternative {
  std::string_view strategy;
  uint64_t staging_bytes = 0;
  std::optional<StateFormat> state_format;  // of the optimizer, where there is one
  int ranks_per_node = 0;
  uint64_t peak_bytes = 0;  // of the largest node
  std::string flags;        // the changed ones: "--strategy node-reader"
};

struct PlanReport {
  CheckpointFacts checkpoint;
  int ranks = 0;
  std::vector<StrategyReport> strategies;
  std::optional<Budget> budget;
  std::optional<bool> fits;               // of the strategy that was asked for
  std::optional<Error> refusal;           // BUDGET with its facts, where it does not fit
  std::vector<Alternative> alternatives;  // which would, the smallest changes first
  std::optional<DeepSpeedForecast> deepspeed;
};
std::string plan_json(const PlanReport& report);
std::string plan_text(const PlanReport& report);

// What one rank found about itself. Plain data: it crosses from the rank's process.
struct RankOutcome : LoadOutcome {
  int32_t rank = 0;
  int32_t pid = 0;
  uint64_t ledger_peak_bytes = 0;
  uint64_t kernel_peak_bytes = 0;
  uint64_t baseline_bytes = 0;
  uint64_t digest = 0;    // this rank's part
  int64_t loaded_ns = 0;  // when the last byte was in place, on the launcher's clock
  int64_t check_ns = 0;   // how long checking took

  int64_t unexplained_bytes() const noexcept {
    return static_cast<int64_t>(kernel_peak_bytes) - static_cast<int64_t>(ledger_peak_bytes) -
           static_cast<int64_t>(baseline_bytes);
  }
};

struct LoadReport {
  CheckpointFacts checkpoint;
  std::string_view strategy;
  Promise promise;
  std::vector<RankOutcome> ranks;  // by rank
  uint64_t launcher_bytes = 0;     // what the launcher held, by the kernel
  double elapsed_s = 0;
  double check_s = 0;
  bool checked = false;
  std::optional<uint64_t> digest;
  std::optional<Budget> budget;
};
std::string digest_text(uint64_t digest);  // 16 hex digits
std::string load_json(const LoadReport& report);
std::string load_text(const LoadReport& report);

// Load and steps in one budget.
struct RehearseReport {
  struct Phase {
    std::string name;                // "load", "step_1", "step_3"
    Promise promise;                 // of this phase
    std::vector<RankOutcome> ranks;  // in this phase, by rank
  };
  CheckpointFacts checkpoint;
  std::string_view strategy;
  StateFormat format = StateFormat::fp32;
  Promise promise;  // of all
  std::vector<Phase> phases;
  uint64_t launcher_bytes = 0;  // what the launcher held, by the kernel
  int steps = 0;
  uint64_t seed = 0;
  double load_s = 0;
  double elapsed_s = 0;
  std::optional<double> grad_norm;  // of the last step; nothing: not finite
  std::optional<double> max_norm;
  uint64_t state_digest = 0;  // parameters and moments after the last step
  uint64_t model_digest = 0;  // what training reads then: as `load --digest`
  std::optional<Budget> budget;
};
std::string rehearse_json(const RehearseReport& report);
std::string rehearse_text(const RehearseReport& report);

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

// What held the optimizer's state, per parameter: by the ledger, and what the process tree holds by
// the kernel beyond `fixed_bytes`.
struct HeldPerParam {
  double ledger = 0;
  double kernel = 0;
};

// The optimizer on its own.
struct StepReport {
  StepTask task;
  int skipped_steps = 0;
  std::string isa;
  std::vector<std::string> isas_not_run;
  Promise promise;
  std::optional<Budget> budget;
  HeldPerParam step_1;
  HeldPerParam last_step;  // the most that was held since step 1
  uint64_t fixed_bytes = 0;
  double bytes_per_param_moved = 0;
  double step_s = 0;  // the median; 0: every step was skipped
  std::optional<double> copy_bytes_per_s;
  std::optional<double> speedup_vs_unfused;
  std::optional<double> grad_norm;  // of the last step, unscaled; nothing: not finite
  std::optional<float> loss_scale;  // after the last step
  uint64_t state_digest = 0;
  uint64_t master_digest = 0;

  double params_per_s() const noexcept;
  double bytes_per_s() const noexcept { return params_per_s() * bytes_per_param_moved; }
};
std::string step_json(const StepReport& report);
std::string step_text(const StepReport& report);

// `{"error": {...}}` with what is known.
std::string error_json(const Error& error);

}  // namespace modicum
