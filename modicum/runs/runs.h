// The door of `runs`: flags are parsed and validated, and a checkpoint is planned as they say, for
// every front alike.
//
// RunFlags is text as a user has written it; open_run reads each flag once, before it opens a file,
// and all that follows is typed. So the command line and Python plan the same. Nothing is held but
// values; any thread.
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

constexpr uint64_t kDefaultStagingBytes = 8 * kMiB;  // of a rank; less where a budget needs it
constexpr int kMaxRanks = 65536;
constexpr int kMaxShardDim = 63;
constexpr std::string_view kFlagSource = "flag";  // of a budget that the user has given
constexpr std::string_view kDefaultExperts = R"(\.experts\.)";

// What says which run is meant: `plan` promises exactly the run that `load` makes of the same
// flags.
struct RunFlags {
  std::string directory;
  int ranks = 1;                      // 1 to kMaxRanks, as ranks_per_node
  std::optional<int> ranks_per_node;  // all on one node
  std::string strategy = "own-shard";
  std::string layout = "fsdp2";
  std::string mesh;   // "AxB" or "AxBxC": hsdp's replicas x shards, tp-fsdp's dp x tp
  int shard_dim = 0;  // 0 to kMaxShardDim
  // Names (regular expressions) that tp-fsdp does not cut along dim 0 as a whole.
  std::string tp_rowwise, tp_packed, tp_replicate;
  std::string expert_mesh;  // "AxB": FSDP x EP
  std::string experts{kDefaultExperts};
  bool round_robin = false;  // of zero1 and zero2
  std::string dtype;
  std::string keep_fp32;
  std::string recipe;
  bool untie = false;  // what is stored under both names of a tie is loaded as two targets
  std::string optimizer = "none";  // or "adamw:FORMAT": what is loaded will be trained
  std::string destination = "cpu";
  std::string staging;
  std::string baseline;
};

// The run that the flags mean, up to its plan.
struct Run {
  FileSystem* files = nullptr;
  Checkpoint checkpoint;
  Recipe recipe;
  Layout layout;
  PlanOptions options;
  std::optional<StateFormat> optimizer;  // whose state is a phase of the plan
  bool staging_given = false;
};
// USAGE for what makes no sense, before any file is opened; then as `open_checkpoint`, and MISMATCH
// or UNSUPPORTED where the recipe isn't one for this checkpoint.
Run open_run(FileSystem& files, const RunFlags& flags);
// The recipe of `options` for a checkpoint, ties as its config has them. Where values depend on
// what a broken config.json should have said (whether an embedding is tied, the block size of FP8
// codes that become numbers): the config's fault, naming the tensor. A `text` decides ties itself.
Recipe make_recipe(const Checkpoint& checkpoint, RecipeOptions options);
// The layout of the flags for these targets. USAGE for flags that contradict each other, and where
// a regular expression matches none of the targets; without targets, only the flags are validated.
Layout asked_layout(const RunFlags& flags, Targets targets);
// The targets of a recipe by their numbers, null for aliases.
std::vector<const TensorSpec*> targets_of(const Recipe& recipe);

// A plan of `run` by `strategy`; with a budget, its default staging shrunk as far as that needs.
Plan plan_run(const Run& run, const Strategy& strategy, const std::optional<Budget>& budget);

// The dtype to load in: nothing where it isn't given; USAGE where it is none that can be cast to.
std::optional<DType> dtype_flag(const std::string& name);

// "SIZE", "auto" or "none" (nothing). `nodes` share this machine: `auto` is divided among them.
std::optional<Budget> budget_of(const std::string& flag, int nodes);
int nodes_of(const RunFlags& flags) noexcept;

// What `plan` answers: every strategy's promise for the run of `flags` and, where `budget` is
// given, whether the asked one fits it, and what would where it does not. Reads headers, index and
// config only.
PlanReport plan_report(FileSystem& files, const RunFlags& flags, const std::string& budget,
                       const DeepSpeedFlags& deepspeed = {});

}  // namespace modicum
