// The trained parameters of a load. Catches: optimizer state for padding, aliases, integers or
// buffers; elements that no rank or two ranks train; a master held twice; fp32 trained in fewer
// bits; an inputs digest without the optimizer; state for frozen parameters.
#include "modicum/runs/trained.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "modicum/io/file_doubles.h"
#include "modicum/runs/runs.h"

namespace modicum {
namespace {

// Parameters of three dtypes with uneven rows, a 0-d one, a tensor of integers, and a tie.
void put_model(MemoryFileSystem& files) {
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {
      {.fqn = "embed", .dtype = DType::bf16, .shape = {13, 6}},
      {.fqn = "gate_up", .dtype = DType::bf16, .shape = {8, 6}},
      {.fqn = "norm", .dtype = DType::f32, .shape = {7}},
      {.fqn = "half", .dtype = DType::f16, .shape = {5, 4}},
      {.fqn = "scalar", .dtype = DType::bf16, .shape = {}},
      {.fqn = "ids", .dtype = DType::i64, .shape = {9}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  std::string targets = R"("head": {"op": "alias", "of": "embed"})";
  for (const TensorSpec& tensor : tensors) {
    targets += ", \"" + tensor.fqn + R"(": {"op": "stored", "name": ")" + tensor.fqn + "\"}";
  }
  files.put("/model/recipe.json", "{\"targets\": {" + targets + "}}");
}

const std::map<std::string, int64_t> kTrained = {
    {"embed", 78}, {"gate_up", 48}, {"norm", 7}, {"half", 20}, {"scalar", 1}};

std::vector<RunFlags> grid() {
  const auto flags = [](const std::string& layout, int ranks, const std::string& mesh = "") {
    return RunFlags{.directory = "/model",
                    .ranks = ranks,
                    .layout = layout,
                    .mesh = mesh,
                    .recipe = "/model/recipe.json",
                    .optimizer = "adamw:fp32-split"};
  };
  std::vector<RunFlags> all = {
      flags("fsdp2", 1),          flags("fsdp2", 4), flags("none", 2),  flags("hsdp", 6, "2x3"),
      flags("tp-fsdp", 4, "2x2"), flags("zero1", 3), flags("zero2", 4), flags("zero3", 3)};
  all.push_back(flags("fsdp2", 3));
  all.back().shard_dim = 1;
  all.push_back(flags("tp-fsdp", 6, "3x2"));
  all.back().tp_packed = "gate_up";
  all.back().tp_rowwise = "embed";
  return all;
}

// Each element of each parameter has one primary rank and lies at its place in the local buffer.
TEST(Trained, ShardsTileTheParametersInTheLoadedBuffers) {
  MemoryFileSystem files;
  put_model(files);
  for (const RunFlags& flags : grid()) {
    SCOPED_TRACE(flags.layout + " " + flags.mesh + " " + std::to_string(flags.shard_dim));
    const modicum::Run run = open_run(files, flags);
    const Plan plan = plan_run(run, *run.options.strategy, std::nullopt);
    std::map<std::string, std::vector<int>> counted;
    for (int rank = 0; rank < flags.ranks; ++rank) {
      for_each_trained(run.recipe, run.layout, *run.optimizer, rank, [&](TrainedShard&& trained) {
        std::vector<int>& ticks = counted[trained.shard.fqn];
        ticks.resize(static_cast<size_t>(kTrained.at(trained.shard.fqn)));
        int64_t local = trained.at;
        for (const ShardRun& each : trained.shard.runs) {
          for (int64_t i = 0; i < each.n; ++i, ++local) {
            ticks[static_cast<size_t>(each.first + i)] += trained.shard.counts ? 1 : 0;
            for_each_held_run(plan, trained.buffer, rank, {local, local + 1},
                              [&](uint32_t target, int64_t global, int64_t, int64_t) {
                                EXPECT_EQ(target, trained.target);
                                EXPECT_EQ(global, each.first + i);
                              });
          }
        }
        EXPECT_LE(local, buffer_of(plan, trained.buffer, rank).numel) << "no padding is trained";
      });
    }
    ASSERT_EQ(counted.size(), kTrained.size());
    for (const auto& [fqn, ticks] : counted) {
      EXPECT_EQ(ticks, std::vector<int>(ticks.size(), 1)) << fqn;
    }
  }
}

TEST(Trained, LoadedMemoryIsTheMasterOrReceivesTheParameter) {
  MemoryFileSystem files;
  put_model(files);
  RunFlags flags = grid()[0];
  const auto states = [&](const std::string& optimizer) {
    flags.optimizer = optimizer;
    const modicum::Run run = open_run(files, flags);
    std::map<std::string, std::string> found;
    for_each_trained(run.recipe, run.layout, *run.optimizer, 0, [&](TrainedShard&& trained) {
      found[trained.shard.fqn] =
          std::string(row_of(trained.format).name) + (trained.is_master() ? "" : ", apart");
    });
    return found;
  };
  using Map = std::map<std::string, std::string>;
  EXPECT_EQ(states("adamw:fp32"), (Map{{"embed", "fp32, apart"},
                                       {"gate_up", "fp32, apart"},
                                       {"norm", "fp32"},
                                       {"half", "fp32, apart"},
                                       {"scalar", "fp32, apart"}}));
  EXPECT_EQ(states("adamw:int8-moments"), (Map{{"embed", "fp32-split"},  // all too small for codes
                                               {"gate_up", "fp32-split"},
                                               {"norm", "fp32"},
                                               {"half", "fp32, apart"},
                                               {"scalar", "fp32-split"}}));
  EXPECT_EQ(states("adamw:bf16-moments"), (Map{{"embed", "bf16-moments"},
                                               {"gate_up", "bf16-moments"},
                                               {"norm", "bf16-moments-fp32"},
                                               {"half", "bf16-moments-fp32, apart"},
                                               {"scalar", "bf16-moments"}}));
}

// Bytes per parameter in addition to the loaded shards, for a million parameters on four ranks.
TEST(Trained, TheStepPhaseIsTheFormatsBytesMinusTheLoadedOnes) {
  MemoryFileSystem files;
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {
      {.fqn = "w", .dtype = DType::bf16, .shape = {4096, 256}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  const auto per_param = [&](const std::string& optimizer, const std::string& dtype) {
    RunFlags flags{.directory = "/model", .ranks = 4, .dtype = dtype, .optimizer = optimizer};
    const modicum::Run run = open_run(files, flags);
    Footprint sum;
    for (const Footprint& of_rank : run.options.after.at(0).of_rank) sum += of_rank;
    EXPECT_EQ(sum[Purpose::staging], 4 * kGradientStagingBytes);
    const uint64_t state = sum[Purpose::master] + sum[Purpose::grad] + sum[Purpose::moments];
    return static_cast<double>(state) / (4096.0 * 256);
  };
  constexpr double kPages = 0.1;  // tolerance: planes are rounded up to pages
  EXPECT_NEAR(per_param("adamw:fp32", ""), 16, kPages);
  EXPECT_NEAR(per_param("adamw:fp32", "float32"), 12, kPages);
  EXPECT_NEAR(per_param("adamw:fp32-split", ""), 12, kPages);
  EXPECT_NEAR(per_param("adamw:fp32-split", "float32"), 12, kPages);
  EXPECT_NEAR(per_param("adamw:bf16-moments", "float16"), 12, kPages);
  EXPECT_NEAR(per_param("adamw:bf16-moments", "float32"), 8, kPages);
  EXPECT_NEAR(per_param("adamw:bf16-moments", ""), 8, kPages);
  EXPECT_NEAR(per_param("adamw:int8-moments-24", ""), 5.0625, kPages);
  EXPECT_NEAR(per_param("adamw:int8-moments-24", "float32"), 6.0625, kPages);
}

TEST(Trained, ThePlanPromisesAndDigestsTheState) {
  MemoryFileSystem files;
  put_model(files);
  RunFlags flags = grid()[1];
  const auto plan_of = [&](const std::string& optimizer, const std::function<void(Plan &&)>& fn) {
    flags.optimizer = optimizer;
    const modicum::Run run = open_run(files, flags);
    fn(plan_run(run, *run.options.strategy, std::nullopt));
  };
  Digest without, with;
  plan_of("none", [&](Plan&& plan) {
    EXPECT_EQ(plan.promise.phases.size(), kLoadPhases);
    without = plan.inputs;
  });
  plan_of("adamw:fp32", [&](Plan&& plan) {
    ASSERT_EQ(plan.promise.phases.size(), kLoadPhases + 1);
    const Footprint& hold = plan.promise.phases[kHoldPhase].of_rank[0];
    const Footprint& step = plan.promise.phases[kLoadPhases].of_rank[0];
    for (size_t p = 0; p < hold.bytes.size(); ++p) EXPECT_LE(hold.bytes[p], step.bytes[p]);
    EXPECT_GT(step[Purpose::moments], 0U);
    EXPECT_EQ(step[Purpose::page_tables], page_table_bytes(step.ledger_total()));
    with = plan.inputs;
  });
  EXPECT_NE(without, with);
  plan_of("adamw:bf16-moments", [&](Plan&& plan) { EXPECT_NE(plan.inputs, with); });
}

TEST(Trained, DtypesThatCanNotBeTrainedAreRefused) {
  MemoryFileSystem files;
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {{.fqn = "w", .dtype = DType::f64, .shape = {4}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  const auto failure = [&](const RunFlags& flags) -> std::optional<Category> {
    try {
      open_run(files, flags);
    } catch (const Error& error) {
      return error.category();
    }
    return std::nullopt;
  };
  RunFlags flags{.directory = "/model"};
  EXPECT_EQ(failure(flags), std::nullopt);
  flags.optimizer = "adamw:fp32";
  EXPECT_EQ(failure(flags), Category::unsupported);
  flags.optimizer = "adamw:fp16";
  EXPECT_EQ(failure(flags), Category::usage);
  flags.optimizer = "sgd";
  EXPECT_EQ(failure(flags), Category::usage);
  flags.optimizer = "adamw:fp32";
  flags.destination = "discard";
  EXPECT_EQ(failure(flags), Category::unsupported);
}

TEST(Trained, FrozenParametersHaveNoState) {
  MemoryFileSystem files;
  put_model(files);
  const auto trained_without = [&](const std::string& frozen, std::vector<std::string> names = {}) {
    RunFlags flags = grid()[1];
    flags.frozen = frozen;
    flags.without_state = std::move(names);
    const modicum::Run run = open_run(files, flags);
    std::set<std::string> names_of;
    for (int rank = 0; rank < flags.ranks; ++rank) {
      for_each_trained(run.recipe, run.layout, *run.optimizer, rank,
                       [&](TrainedShard&& trained) { names_of.insert(trained.shard.fqn); });
    }
    const Plan plan = plan_run(run, *run.options.strategy, std::nullopt);
    return std::pair(names_of, plan.promise.phases.back().of_rank[0][Purpose::moments]);
  };
  using Names = std::set<std::string>;
  const auto [all, bytes_of_all] = trained_without("");
  EXPECT_EQ(all, (Names{"embed", "gate_up", "norm", "half", "scalar"}));
  EXPECT_EQ(trained_without("^(embed|half)$").first, (Names{"gate_up", "norm", "scalar"}));
  EXPECT_EQ(trained_without("head").first, (Names{"gate_up", "norm", "half", "scalar"}))
      << "'head' is an alias of 'embed'";
  EXPECT_EQ(trained_without("norm", {"half", "scalar"}).first, (Names{"embed", "gate_up"}));
  EXPECT_EQ(trained_without(".").first, Names{});
  EXPECT_EQ(trained_without(".").second, 0U);
  EXPECT_GT(bytes_of_all, 0U);
}

TEST(Trained, AFrozenBaseMayHaveAnyDtype) {
  MemoryFileSystem files;
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {{.fqn = "base", .dtype = DType::f64, .shape = {4}},
                                           {.fqn = "lora", .dtype = DType::bf16, .shape = {4}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  RunFlags flags{.directory = "/model", .optimizer = "adamw:fp32", .frozen = "base"};
  const modicum::Run run = open_run(files, flags);
  EXPECT_EQ(trained_sizes(run.recipe), std::vector<int64_t>{4});
  const auto refusal = [&]() -> std::string {
    try {
      open_run(files, flags);
    } catch (const Error& error) {
      return std::string(category_name(error.category())) + " " + error.what();
    }
    return "";
  };
  flags.frozen = "nomatch";
  EXPECT_NE(refusal().find("USAGE"), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("nomatch"), std::string::npos) << refusal();
  flags.frozen = "(";
  EXPECT_NE(refusal().find("--frozen"), std::string::npos) << refusal();
  flags.frozen = "base";
  flags.optimizer = "none";
  EXPECT_NE(refusal().find("--optimizer"), std::string::npos) << refusal();
}

// Shards with too many runs are refused before the list of runs fills the memory.
TEST(Trained, AShardOfTooManyRunsIsRefused) {
  const Manifest nothing;
  RecipeBuilder builder(nothing);
  const int64_t rows = (int64_t{1} << 22) + 1;
  builder.target("tall", builder.init(InitRule::zeros, 0, {rows, 4}, DType::f32));
  const Recipe recipe = builder.finish();
  try {
    step_phase(recipe, fsdp2_layout(2, 1), StateFormat::fp32);
    ADD_FAILURE() << "expected UNSUPPORTED, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::unsupported);
    EXPECT_EQ(error.facts().tensor, "tall");
  }
  const Phase whole_rows = step_phase(recipe, fsdp2_layout(2), StateFormat::fp32);
  // Moments (8 bytes) and gradient (4 bytes) of half of the 2^24 elements.
  EXPECT_GT(whole_rows.of_rank[0].total(), uint64_t{12} << 23);
}

// Must fail if a rank's footprint is that of a rank with other shards.
TEST(Trained, ReplicasHaveTheStepPhaseOfTheirShards) {
  const Manifest nothing;
  RecipeBuilder builder(nothing);
  builder.target("a", builder.init(InitRule::zeros, 0, {4, 3000}, DType::bf16));
  const Recipe recipe = builder.finish();
  const Phase of_shards = step_phase(recipe, fsdp2_layout(3), StateFormat::fp32);
  const Phase hsdp = step_phase(recipe, hsdp_layout(2, {3}), StateFormat::fp32);
  ASSERT_NE(of_shards.of_rank[0], of_shards.of_rank[2]) << "3 ranks have 2, 2 and 0 of 4 rows";
  for (size_t rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(hsdp.of_rank[rank], of_shards.of_rank[rank % 3]) << rank;
  }
}

}  // namespace
}  // namespace modicum
