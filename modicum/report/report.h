// The public header of `report`: predicted and measured values next to each other, as text and as
// JSON. The JSON keys are a contract with scripts: keys may be added, but not renamed or removed.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/plan/plan.h"
#include "modicum/report/compare.h"   // IWYU pragma: export
#include "modicum/report/doctor.h"    // IWYU pragma: export
#include "modicum/report/page.h"      // IWYU pragma: export
#include "modicum/report/past_run.h"  // IWYU pragma: export
#include "modicum/watch/watch.h"

namespace modicum {

// The size of a checkpoint, its revision, and its warnings.
struct CheckpointFacts {
  uint64_t bytes = 0;  // tensor data
  uint64_t tensors = 0;
  uint64_t files = 0;
  std::optional<HubModel> hub;        // where the files are from, if that is known
  std::string model_type;             // of config.json; may be empty
  std::vector<std::string> warnings;  // broken optional files, unused tensors, oddities
};
CheckpointFacts facts_of(const Checkpoint& checkpoint);

// The files, tensors, dtypes and warnings of a checkpoint. `verbose`: a line per tensor.
std::string inspect_json(const Checkpoint& checkpoint);
std::string inspect_text(const Checkpoint& checkpoint, bool verbose);

// The promises of a job with an optimizer: load, steps and save, then a resume by the same number
// of ranks.
struct JobPromise {
  Promise save;    // load, steps and save, as verb `save` runs them
  Promise resume;  // load and step, as verb `resume` runs them

  uint64_t node_peak_bytes(int node) const;
};

// What a node holds in addition to the trainer in reinforcement learning.
struct NodeFlags {
  bool reference = false;  // a second, frozen model, loaded with the trainer's layout
  bool backup = false;     // a copy of each rank's parameters
  int engine_tp = 0;       // ranks that share one inference engine's weights; 0: no engine

  bool is_any() const noexcept { return reference || backup || engine_tp > 0; }
};

// Host memory of one node that trains with reinforcement learning, by phase and holder.
struct NodeTimeline {
  struct Holder {
    std::string_view name;        // "trainer", "reference", "backup", "engine"
    std::vector<uint64_t> bytes;  // by phase
  };
  std::vector<std::string_view> phases;
  std::vector<Holder> holders;  // the trainer first

  uint64_t bytes_at(size_t phase) const;
  size_t peak_phase() const;
  uint64_t peak_bytes() const { return bytes_at(peak_phase()); }
};

// One strategy's promise and traffic.
struct StrategyReport {
  std::string_view strategy;
  Promise promise;
  Traffic traffic;
  uint64_t needed_bytes = 0;            // stored bytes that shards need, summed over the ranks
  std::optional<JobPromise> job;        // only with an optimizer
  std::vector<NodeTimeline> timelines;  // by node; only with NodeFlags

  // Bytes read / bytes needed. Above 1 if ranks read elements of other ranks, or gaps between runs;
  // below 1 if one read serves several ranks.
  double overread_ratio() const noexcept;
};

// The host memory that DeepSpeed itself would hold for the same training, line by line.
struct DeepSpeedForecast {
  struct Line {
    std::string name;
    std::string_view owner;    // "deepspeed", "fork", "pinned rounding", "process"
    std::string_view phase;    // in which it is allocated: "init", "step_1", "epoch_2"
    std::string_view purpose;  // its owner on a page: "master", "fork"
    bool is_fixed = false;     // whether `bytes` do not grow with params_of_rank
    uint64_t bytes = 0;        // per rank
  };
  struct Sum {
    uint64_t bytes = 0;        // per rank
    uint64_t fixed_bytes = 0;  // of those, the bytes of fixed lines
    void add(const Line& line) noexcept;
  };
  struct StateFormatBytes {  // the memory of Modicum's optimizer state
    StateFormat format = StateFormat::fp32;
    uint64_t bytes = 0;  // per rank
  };
  std::string_view version;  // of DeepSpeed
  int stage = 0;
  uint64_t params = 0;          // of the model
  uint64_t params_of_rank = 0;  // those whose optimizer state one rank holds
  int ranks_of_node = 1;        // on the largest node
  std::vector<Line> lines;
  std::vector<StateFormatBytes> ours;

  static std::span<const std::string_view> phases() noexcept;  // in order
  Sum sum_at(std::string_view phase) const noexcept;           // at the end of the phase
  Sum sum_of(std::string_view owner) const noexcept;           // in all phases
  uint64_t peak_bytes() const noexcept;                        // per rank, in the last phase
  uint64_t on_node(uint64_t bytes) const noexcept;  // `bytes` of a rank, on the largest node
  // Per parameter of the rank, without fixed bytes.
  double per_param(const Sum& sum) const noexcept;
};

constexpr std::string_view kDeepSpeed = "DeepSpeed";
constexpr std::string_view kInPlaceOfDeepSpeed = "Modicum's AdamW in place of DeepSpeed's";

// The requested run, or another one, with changes after which its plan or forecast fits the budget.
struct Alternative {
  std::string_view who;  // kDeepSpeed or kInPlaceOfDeepSpeed; empty: the requested run
  std::string_view strategy;
  uint64_t staging_bytes = 0;
  std::optional<StateFormat> state_format;  // none: no optimizer
  int ranks_per_node = 0;
  uint64_t peak_bytes = 0;     // of the fullest node
  std::optional<DType> dtype;  // of --dtype, if it changes
  bool is_lossless = true;     // see `note`
  // What another dtype or state format keeps, loses and changes. Empty: neither changes.
  std::string note;
  std::string flags;   // only those that change: "--strategy node-reader"
  std::string config;  // of who trains with DeepSpeed: a JSON merge patch for its configuration
};

// What a rank process is assumed to hold before the load.
struct Baseline {
  uint64_t bytes = kBaselineBytes;
  bool is_given = false;  // by --baseline
};

struct PlanReport {
  CheckpointFacts checkpoint;
  int ranks = 0;
  std::string_view strategy;  // the requested one
  std::vector<StrategyReport> strategies;
  std::optional<Budget> budget;
  // With the requested strategy, whether the load, the job, and all holders of NodeFlags fit the
  // budget; and whether DeepSpeed does. All are empty without a budget, and all but `fits` without
  // their subject: a job, NodeFlags, a forecast.
  std::optional<bool> fits, job_fits, node_fits, deepspeed_fits;
  std::optional<Error> refusal;           // BUDGET, if the requested strategy's load does not fit
  std::optional<Error> wider_refusal;     // BUDGET, if all holders or DeepSpeed don't fit
  std::vector<Alternative> alternatives;  // runs that would fit, the cheapest changes first
  std::optional<DeepSpeedForecast> deepspeed;
  std::optional<PastRun> past;  // of --from; its limit is the default budget
  Baseline baseline;
  std::vector<PageFact> inputs;        // the run's, in words, for the page
  std::string optimizer;               // in words; empty: none
  std::vector<uint64_t> device_bytes;  // of parameters, by rank; empty: they are on the host

  const StrategyReport& requested() const;  // of `strategy`
};
// The timeline of `node`. `engine_bytes`: the size of one engine's weights.
NodeTimeline node_timeline(const JobPromise& job, const NodeFlags& flags, uint64_t engine_bytes,
                           int node);
// Whether a forecast has lines: DeepSpeed's configuration has offload_optimizer.
bool has_forecast(const PlanReport& report);
// BUDGET unless DeepSpeed's own memory fits the budget. Requires report.budget and deepspeed.
std::optional<Error> refusal_of_deepspeed(const PlanReport& report);
// BUDGET unless all holders on each node fit the budget with the requested strategy. Requires
// report.budget and timelines.
std::optional<Error> refusal_of_timelines(const PlanReport& report);
std::string plan_json(const PlanReport& report);
// Begins with the answer: whether the run fits, and the cheapest changes after which it does.
// `compares`: with all strategies; otherwise only the requested one.
std::string plan_text(const PlanReport& report, bool compares);
// How a page was made.
struct PageOrigin {
  std::string command;
  std::string date;
  std::string version;  // of Modicum
};
// An HTML page with the verdict and the inputs of the plan. Its chart has the phases of the
// requested run one after another, on the run's fullest node. With a forecast of DeepSpeed the
// chart has DeepSpeed's phases; the requested run then gets a second chart if it has an optimizer.
std::string plan_page(const PlanReport& report, std::string_view title, const PageOrigin& origin);

// One rank's outcome. Trivially copyable, since the rank posts it on the board (post_value).
struct RankOutcome : LoadOutcome {
  int32_t rank = 0;
  int32_t pid = 0;
  uint64_t ledger_peak_bytes = 0;
  uint64_t kernel_peak_bytes = 0;
  uint64_t baseline_bytes = 0;
  uint64_t digest = 0;    // this rank's part of the model's digest
  int64_t loaded_ns = 0;  // when the last byte was in place, on the launcher's clock
  int64_t check_ns = 0;   // duration of --check

  int64_t unexplained_bytes() const noexcept {
    return static_cast<int64_t>(kernel_peak_bytes) - static_cast<int64_t>(ledger_peak_bytes) -
           static_cast<int64_t>(baseline_bytes);
  }
};

// The saved checkpoint that a resume loaded, and the newer ones that it skipped.
struct ResumedCheckpoint {
  struct SkippedCheckpoint {
    int64_t step = 0;  // S of ROOT/step-S
    std::string reason;
  };
  int64_t step = 0;
  std::string path;
  std::vector<SkippedCheckpoint> skipped;
};

// A phase of a run, with the memory of the ranks in it.
struct PhaseReport {
  std::string name;                // "load", "step_1", "step_3"
  Promise promise;                 // of this phase
  std::vector<RankOutcome> ranks;  // in this phase, by rank
};

// The measured memory of the launcher.
struct LauncherMemory {
  uint64_t with_ranks = 0;  // when rank 0 had finished; pages shared with ranks count in part
  uint64_t alone = 0;       // its highest at any time
};

struct LoadReport {
  CheckpointFacts checkpoint;
  std::string_view strategy;
  Promise promise;
  Promise full_per_rank;           // of the same run if each rank read the whole model
  std::vector<RankOutcome> ranks;  // by rank
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes;  // during this run, page cache included
  double elapsed_s = 0;
  double check_s = 0;
  bool checked = false;
  std::optional<uint64_t> digest;
  std::optional<ResumedCheckpoint> resumed;
  std::optional<uint64_t> state_digest;  // of a resumed optimizer state
  std::vector<PhaseReport> phases;       // of a resumed state: `resume`, `step_resumed`
  ComparedValues compared;               // of a checkpoint
  std::optional<Budget> budget;
};
std::string digest_text(uint64_t digest);  // 16 hex digits
std::string load_json(const LoadReport& report);
std::string load_text(const LoadReport& report);

// A load and optimizer steps within one budget; optionally a save, and a resume by new ranks.
struct RehearseReport {
  struct SavedCheckpointReport {
    int64_t step = 0;
    std::string path;
    uint64_t written_bytes = 0;
    int resume_ranks = 0;
    uint64_t resumed_digest = 0;  // of the state after the resumed step
  };
  CheckpointFacts checkpoint;
  std::string_view strategy;
  StateFormat format = StateFormat::fp32;
  std::vector<uint64_t> promised_bytes;  // by node: the highest promise of all phases
  std::vector<PhaseReport> phases;
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes;  // in all phases, page cache included
  int steps = 0;
  uint64_t seed = 0;
  double load_s = 0;
  double elapsed_s = 0;
  std::optional<double> grad_norm;  // of the last step; none: not finite
  std::optional<double> max_norm;
  uint64_t state_digest = 0;                   // parameters and moments after the last step
  uint64_t model_digest = 0;                   // parameters after the last step, as `load --digest`
  std::optional<SavedCheckpointReport> saved;  // if set, both digests are those after one more step
  std::optional<Budget> budget;

  // Adds the phases and the digest of a resume. Raises `promised_bytes` where it promises more.
  void add_resumed(const LoadReport& resumed);
};
std::string rehearse_json(const RehearseReport& report);
std::string rehearse_text(const RehearseReport& report);

// A load and a save.
struct SaveReport {
  struct File {
    std::string name;
    uint64_t bytes = 0;
  };
  CheckpointFacts checkpoint;
  std::string_view strategy;
  Promise promise;
  std::vector<RankOutcome> ranks;  // over load and save, by rank
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes;  // during this run, page cache included
  int64_t step = 0;                           // S of ROOT/step-S
  bool is_preempted = false;  // a stop signal came; the save was finished nevertheless
  std::string path;
  bool is_durable =
      true;  // whether the checkpoint survives a power cut, as far as the kernel tells
  uint64_t written_bytes = 0;
  uint64_t read_bytes = 0;               // while saving, to copy tensors
  uint64_t gathered_bytes = 0;           // part of `written_bytes` that ranks of a node gathered
  double elapsed_s = 0;                  // until all bytes of the ranks were durable
  double durable_s = 0;                  // until the checkpoint was complete and durable
  uint64_t digest = 0;                   // of the model, as `load --digest`
  std::optional<uint64_t> state_digest;  // of an optimizer's parameters and moments
  std::vector<File> files;
  std::vector<DamagedCheckpoint> damaged;  // a checkpoint of this number that the save has renamed
  std::vector<std::string> copied;    // stored tensors that no target reads, copied from the source
  std::vector<std::string> left_out;  // stored tensors that are neither restored nor copied
  ComparedValues compared;            // if the source is a saved checkpoint
  std::optional<Budget> budget;
};
std::string save_json(const SaveReport& report);
std::string save_text(const SaveReport& report);

// The differences between two checkpoints.
struct DiffReport {
  struct Difference {
    std::string tensor;
    std::string_view kind;  // "only_in_a", "only_in_b", "dtype", "shape", "values"
    int64_t first_index = 0;
    int64_t count = 0;              // of differing elements
    std::optional<double> largest;  // difference of numbers; infinite for infinity or NaN
    int64_t largest_index = 0;
    std::vector<int64_t> shape;
    std::string_view dtype_a, dtype_b;  // set for "dtype"
    std::string_view rounded_to;        // set for "dtype" if the values were compared
    int64_t overflowed = 0;             // finite values that became infinite by the rounding
  };
  uint64_t tensors = 0;               // compared
  uint64_t bytes = 0;                 // compared, of A
  ComparedValues with_record;         // of the saved checkpoints among A and B
  std::vector<std::string> warnings;  // of A and of B
  std::vector<Difference> differences;

  // The differences of dtypes alone: values were compared, and are equal after rounding.
  uint64_t equal_after_rounding() const noexcept;
  // "all values are equal after rounding", and how many overflowed, if any. For such differences.
  std::string rounding_text() const;
};
std::string diff_json(const DiffReport& report);
std::string diff_text(const DiffReport& report);

// A conversion of a checkpoint.
struct ConvertReport {
  CheckpointFacts checkpoint;
  Promise promise;
  std::vector<RankOutcome> ranks;  // one rank
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes;  // during this run, page cache included
  std::string path;
  bool is_durable = true;  // as in SaveReport
  uint64_t written_bytes = 0;
  uint64_t kept_files = 0;  // written by an earlier, interrupted call, and kept
  double elapsed_s = 0;     // until the output was durable
  uint64_t digest = 0;      // of the output, as `load --digest`
  std::vector<SaveReport::File> files;
  std::vector<std::string> left_out;  // stored tensors that the recipe leaves unused
  ComparedValues compared;            // if the source is a saved checkpoint
  // Tensors with values that are infinite or zero in their new dtype; empty if a checkpoint was
  // converted, which casts nothing.
  std::optional<std::vector<TensorLoss>> losses;
  std::optional<Budget> budget;
  std::optional<int64_t> step;  // its number, if a checkpoint of a run was converted
};
std::string convert_json(const ConvertReport& report);
std::string convert_text(const ConvertReport& report);

// The result of checking a checkpoint, or all checkpoints of a run.
struct VerifyReport {
  struct File {
    std::string name;
    uint64_t bytes = 0;
    std::string result;  // "ok", or the error
  };
  std::vector<File> files;
  uint64_t tensors_checked = 0;
  std::vector<DamagedCheckpoint> damaged;  // renamed by saves; an empty reason: it is intact
  std::vector<std::string> warnings;
  std::optional<Error> fault;  // the first one in `files`
};
std::string verify_json(const VerifyReport& report);
std::string verify_text(const VerifyReport& report);

// A watched command. The text, for stderr, has the memory of the largest processes at the peak, and
// a paragraph about an OOM kill.
std::string watch_json(const WatchRecord& record);
std::string watch_page(const WatchRecord& record);
std::string watch_text(const WatchRecord& record);
// That paragraph, as one line; empty without an OOM kill.
std::string killed_text(const WatchRecord& record);
// What grew in the command, and what to run next; empty if nothing grew.
std::string growth_text(const WatchRecord& record);
std::string next_text(const WatchRecord& record);
// A document in the Trace Event Format: memory by process and owner, and phases.
std::string watch_trace(const WatchRecord& record);

// The inputs of verb `step`: one parameter of `params` elements, divided among the ranks at
// multiples of kBucketElements.
struct StepTask {
  StateFormat format = StateFormat::fp32;
  int64_t params = 0;
  int ranks = 1;
  int threads = 1;  // per rank
  int steps = 5;
  uint64_t seed = 0;
  std::optional<double> max_norm;
  std::optional<float> loss_scale;  // initial
  DType grad_dtype = DType::f32;
  int children = 0;      // forked by each rank
  bool compares = true;  // the step's speed with that of a copy and of separate passes
};

// Memory of the optimizer's state in bytes per parameter. `ledger`: as charged. `kernel`: measured
// memory of the process tree minus StepReport::fixed_bytes.
struct HeldPerParam {
  double ledger = 0;
  double kernel = 0;
};

// Optimizer steps without a load.
struct StepReport {
  StepTask task;
  int skipped_steps = 0;
  std::string isa;                        // the instruction set that the kernels used
  std::vector<std::string> isas_not_run;  // compiled in, but not supported by this CPU
  Promise promise;
  std::optional<Budget> budget;
  HeldPerParam step_1;
  HeldPerParam last_step;            // at the peak since step 1
  uint64_t fixed_bytes = 0;          // of the process tree before the states are allocated
  double bytes_per_param_moved = 0;  // read and written by a step
  double step_s = 0;                 // median; 0: every step was skipped
  // Only with StepTask::compares.
  std::optional<double> copy_bytes_per_s;
  std::optional<double> speedup_vs_unfused;
  std::optional<double> grad_norm;  // of the last step, unscaled; none: not finite
  std::optional<float> loss_scale;  // after the last step
  uint64_t state_digest = 0;
  uint64_t master_digest = 0;

  double params_per_s() const noexcept;
  double bytes_per_s() const noexcept { return params_per_s() * bytes_per_param_moved; }
};
std::string step_json(const StepReport& report);
std::string step_text(const StepReport& report);

// The document `{"error": {...}}`, with those facts that the error has.
std::string error_json(const Error& error);

}  // namespace modicum
