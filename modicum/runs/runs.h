// The door of `runs`: turns flags into an opened checkpoint, a recipe, a layout and a plan. The
// command line and Python share it, so that both make the same plans.
//
// RunFlags has the user's texts. open_run parses each flag once, before it opens a file; after that
// everything is typed. Values; any thread.
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
  std::string mesh;   // "AxB" or "AxBxC": hsdp's replicas x shards, tp-fsdp's dp x tp
  int shard_dim = 0;  // 0 to kMaxShardDim
  // Regular expressions: tensors that tp-fsdp does not shard along dim 0 as a whole.
  std::string tp_rowwise, tp_packed, tp_replicate;
  std::string expert_mesh;  // "AxB": FSDP x EP
  std::string experts{kDefaultExperts};
  bool round_robin = false;  // of zero1 and zero2
  std::string dtype;
  std::string keep_fp32;
  std::string recipe;
  bool untie = false;  // a tied tensor that is stored under both names is loaded as two targets
  std::string optimizer = "none";  // or "adamw:FORMAT": the optimizer's state is held, too
  std::string frozen;              // a regular expression: parameters that the optimizer leaves out
  std::vector<std::string> without_state;  // FQNs of more of them (from a saved state)
  std::string destination = "cpu";
  std::string staging;
  std::string baseline;
};

// A run before its plan: the opened checkpoint, the recipe, the layout and the options.
struct Run {
  FileSystem* files = nullptr;
  Checkpoint checkpoint;
  Recipe recipe;
  Layout layout;
  PlanOptions options;
  std::optional<StateFormat> optimizer;  // the plan then has a phase `step` for its state
  bool staging_given = false;
};
// USAGE for invalid or contradicting flags, before any file is opened. Then errors as those of
// open_checkpoint, and MISMATCH or UNSUPPORTED if the recipe does not fit the checkpoint.
Run open_run(FileSystem& files, const RunFlags& flags);
// The same for a given checkpoint, opened or yet to be written; `flags.directory` is ignored.
Run run_of(FileSystem& files, const RunFlags& flags, Checkpoint checkpoint);
// The recipe of `options` for a checkpoint, with ties from its config. If a value depends on a key
// of config.json that can't be read (whether an embedding is tied, the block size of dequantised
// FP8 codes), throws the config's error, naming the tensor. A recipe in `options.text` has its own
// ties.
Recipe make_recipe(const Checkpoint& checkpoint, RecipeOptions options);
// The layout of the flags for these targets. USAGE for flags that contradict each other, and where
// a regular expression matches none of the targets; without targets, only the flags are validated.
Layout asked_layout(const RunFlags& flags, Targets targets);
// The targets of a recipe by number, null for aliases.
std::vector<const TensorSpec*> targets_of(const Recipe& recipe);

// The plan of `run` with `strategy`. With a budget, the default staging is shrunk to fit.
Plan plan_run(const Run& run, const Strategy& strategy, const std::optional<Budget>& budget);

// The value of --dtype, empty for an empty text; USAGE unless tensors can be cast to it.
std::optional<DType> dtype_flag(const std::string& name);

// Parses "SIZE", "auto" or "none" (no budget). `auto` is divided equally among `nodes`, all on this
// machine.
std::optional<Budget> budget_of(const std::string& flag, int nodes);
int nodes_of(const RunFlags& flags) noexcept;

// The flags of `plan` besides those of the run.
struct PlanFlags {
  std::string budget;
  DeepSpeedFlags deepspeed;
  std::string from;  // the document of an earlier run, whose limit is the default budget
};
// The report of verb `plan` without its job: every strategy's promise for the run of `flags`; with
// a budget, whether the requested strategy fits it, and if not, runs that would fit. Reads headers,
// index and config only. `more` is called at the end, with the opened run.
using MoreOfPlan = FunctionRef<void(const Run& run, PlanReport& report)>;
PlanReport plan_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan,
                       MoreOfPlan more);

}  // namespace modicum
