// The public header of `runs`: turns flags into an opened checkpoint, a recipe, a layout and a
// plan. The command line and Python share it, so that both make the same plans.
//
// RunFlags has the texts that the user gave. open_run validates them before it opens a file, and
// later checks that they suit the checkpoint. The Run that it returns has typed values. Any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/baselines/baselines.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/plan/plan.h"
#include "modicum/recipe/recipe.h"
#include "modicum/report/report.h"
#include "modicum/runs/expectation.h"  // IWYU pragma: export
#include "modicum/runs/trained.h"      // IWYU pragma: export
#include "modicum/runs/would_fit.h"    // IWYU pragma: export

namespace modicum {

constexpr uint64_t kDefaultStagingBytes = 8 * kMiB;  // per rank; shrinks to fit a budget
constexpr int kMaxRanks = 65536;
constexpr int kMaxShardDim = 63;
constexpr std::string_view kFlagSource = "flag";  // the source of a budget given by the user
constexpr std::string_view kDefaultExperts = R"(\.experts\.)";

// The flags that determine a run: `plan` promises exactly the run that `load` makes with equal
// flags.
struct RunFlags {
  std::string directory;
  int ranks = 1;                      // 1 to kMaxRanks
  std::optional<int> ranks_per_node;  // 1 to kMaxRanks; none: all ranks on one node
  std::string strategy = "own-shard";
  std::string layout = "fsdp2";
  // "AxB" or "AxBxC". hsdp: A replicas of B (x C) shards. tp-fsdp: the last size is tp, the product
  // of the others is dp.
  std::string mesh;
  int shard_dim = 0;  // 0 to kMaxShardDim
  // Regular expressions of the tensors that tp-fsdp shards along dim 1, shards along dim 0 in
  // packed parts, or replicates. All other tensors are sharded along dim 0.
  std::string tp_rowwise, tp_packed, tp_replicate;
  std::string expert_mesh;  // "AxB": FSDP x EP
  std::string experts{kDefaultExperts};
  bool round_robin = false;  // with zero1 and zero2
  std::string dtype;         // "": as stored
  std::string keep_fp32;     // a regular expression: tensors that are loaded as float32
  std::string recipe;        // a path, or ""
  bool untie = false;  // a tied tensor that is stored under both names is loaded as two targets
  std::string optimizer = "none";  // or "adamw:FORMAT": ranks hold the optimizer's state, too
  std::string frozen;              // a regular expression: parameters that the optimizer leaves out
  std::vector<std::string> without_state;  // FQNs of more frozen parameters (from a saved state)
  std::string destination = "cpu";         // or "discard"
  bool on_device = false;                  // parameters on devices, the optimizer's state on hosts
  std::string staging;                     // a size; "": kDefaultStagingBytes
  std::string baseline;                    // a size; "": kBaselineBytes
  int threads = 0;                         // of each rank; 0: threads_per_rank
};
// The threads of each of `ranks` processes on this machine: `asked`, or if that is 0, the CPUs that
// this process may use, divided by the ranks, but at least 1.
int threads_per_rank(int asked, int ranks);

// A run before its plan: the opened checkpoint, the recipe, the layout and the options.
struct Run {
  FileSystem* files = nullptr;
  Checkpoint checkpoint;
  Recipe recipe;
  Layout layout;
  PlanOptions options;
  std::optional<StateFormat> optimizer;  // the plan then has a phase `step` for its state
  bool staging_given = false;            // by the user; such staging is not shrunk to fit a budget
  bool on_device = false;                // RunFlags::on_device
};
// The most ranks on a node.
int ranks_per_node_of(const Run& run) noexcept;
// The phase `step` of a plan of `run` with this state format.
Phase step_phase_of(const Run& run, StateFormat format);
// Throws USAGE for invalid or contradicting flags before it opens a file. Then throws the errors of
// open_checkpoint (with Content::headers, of which config.json alone is enough for the families of
// `synth`, of config_tensors), USAGE for a regular expression that matches no tensor, and MISMATCH
// or UNSUPPORTED if the recipe does not fit the checkpoint.
Run open_run(FileSystem& files, const RunFlags& flags, Content content = Content::values);
// As open_run, for a checkpoint that is already opened or yet to be written, and the text of a
// recipe; ignores `flags.directory` and `flags.recipe`.
Run run_of(FileSystem& files, RunFlags flags, Checkpoint checkpoint,
           std::optional<std::string> recipe);
// The recipe of `options` for a checkpoint. `options.text` states the ties; without a text they
// come from the checkpoint's config. If the recipe depends on a key of config.json that can't be
// read (whether an embedding is tied, the block size of dequantised FP8 codes), throws the config's
// error with the tensor.
Recipe make_recipe(const Checkpoint& checkpoint, RecipeOptions options);
// The layout that the flags describe, for these targets. Throws USAGE if flags contradict each
// other or a regular expression matches none of the targets. Without targets, validates the flags
// only.
Layout asked_layout(const RunFlags& flags, Targets targets);
// The targets of a recipe by index; null for aliases.
std::vector<const TensorSpec*> targets_of(const Recipe& recipe);

// The plan of `run` with `strategy`. With a budget, the default staging is shrunk to fit.
Plan plan_run(const Run& run, const Strategy& strategy, const std::optional<Budget>& budget);

// Parses --dtype; nullopt for an empty text. Throws USAGE unless tensors can be cast to the dtype.
std::optional<DType> dtype_flag(const std::string& name);

// Parses a budget per node: "SIZE", "none" (no budget) or "auto", the memory available on this
// machine, divided equally among `nodes`, which all run on it.
std::optional<Budget> budget_of(const std::string& flag, int nodes);
int nodes_of(const RunFlags& flags) noexcept;

// The flags of verb `plan` in addition to those of the run.
struct PlanFlags {
  std::string budget;
  DeepSpeedFlags deepspeed;
  NodeFlags node;
  std::string from;  // the document of an earlier run, whose limit is the default budget
};
// The inputs of a plan in words: model, dtype, optimizer, ranks, strategy, layout, DeepSpeed.
std::vector<PageFact> inputs_of(const RunFlags& flags, const PlanFlags& of_plan, const Run& run);

// The save and the resume of a plan, which the room `training` plans.
struct JobOfPlan {
  FunctionRef<void(const Run& run, PlanReport& report)> extend;
  FitsJob fits;
};
// The report of verb `plan`, except StrategyReport::job and `timelines`: each strategy's promise
// for the run of `flags`; with a budget, whether the requested strategy fits it, and if not, runs
// that would fit. Of the checkpoint, reads only headers, index and config. `job.extend` adds the
// job's promises and whether they fit.
PlanReport plan_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan,
                       const JobOfPlan& job);

}  // namespace modicum
