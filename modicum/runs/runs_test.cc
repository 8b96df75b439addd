#include "modicum/runs/runs.h"

#include <gtest/gtest.h>

#include <functional>

#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

// Two bf16 tensors in one file: [12, 16] and one element.
void put_checkpoint(FileSystem& files) {
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {{.fqn = "w", .dtype = DType::bf16, .shape = {12, 16}},
                                           {.fqn = "s", .dtype = DType::bf16, .shape = {1}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
}

RunFlags flags_of(const std::function<void(RunFlags&)>& change) {
  RunFlags flags{.directory = "/model"};
  change(flags);
  return flags;
}

PlanReport report_of(FileSystem& files, const RunFlags& flags, const std::string& budget,
                     const DeepSpeedFlags& deepspeed = {}) {
  const auto extend = [](const Run&, PlanReport&) {};
  const auto fits_job = [](const RunFlags&, const Run&, const PlanOptions&) { return true; };
  return plan_report(files, flags, {.budget = budget, .deepspeed = deepspeed}, {extend, fits_job});
}

std::optional<Category> failure(FileSystem& files, const RunFlags& flags) {
  try {
    open_run(files, flags);
  } catch (const Error& error) {
    return error.category();
  }
  return std::nullopt;
}

TEST(Runs, InvalidFlagsAreRefusedBeforeAnyFileIsOpened) {
  MemoryFileSystem memory;
  put_checkpoint(memory);
  RecordingFileSystem files(memory);
  const std::vector<std::function<void(RunFlags&)>> invalid = {
      [](RunFlags& f) { f.ranks = 0; },
      [](RunFlags& f) { f.ranks = kMaxRanks + 1; },
      [](RunFlags& f) { f.ranks_per_node = 0; },
      [](RunFlags& f) { f.ranks_per_node = -1; },
      [](RunFlags& f) { f.shard_dim = -1; },
      [](RunFlags& f) { f.shard_dim = kMaxShardDim + 1; },
      [](RunFlags& f) { f.strategy = "own-shards"; },
      [](RunFlags& f) { f.layout = "fsdp3"; },
      [](RunFlags& f) { f.dtype = "int8"; },
      [](RunFlags& f) { f.destination = "gpu"; },
      [](RunFlags& f) { f.staging = "much"; },
      [](RunFlags& f) { f.baseline = "-1"; }};
  for (const auto& change : invalid) {
    EXPECT_EQ(failure(files, flags_of(change)), Category::usage);
  }
  EXPECT_TRUE(files.calls().empty());
  EXPECT_EQ(failure(files, flags_of([](RunFlags&) {})), std::nullopt);
}

// Must fail if the error is that a flag does not apply, although the layout does not exist.
TEST(Runs, AnUnknownLayoutIsNamedBeforeFlagsThatDependOnIt) {
  MemoryFileSystem files;
  put_checkpoint(files);
  try {
    open_run(files, {.directory = "/model", .layout = "fsdp3", .shard_dim = 1});
    ADD_FAILURE() << "expected USAGE, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_EQ(error.what_happened(), "unknown layout 'fsdp3'; nearest is 'fsdp2'");
  }
}

TEST(Runs, TheLastNodeMayHaveFewerRanks) {
  EXPECT_EQ(nodes_of({.ranks = 8}), 1);
  EXPECT_EQ(nodes_of({.ranks = 8, .ranks_per_node = 4}), 2);
  EXPECT_EQ(nodes_of({.ranks = 9, .ranks_per_node = 4}), 3);
  EXPECT_EQ(nodes_of({.ranks = 2, .ranks_per_node = 4}), 1);
}

TEST(Runs, FitsTellsWhetherTheRequestedStrategyFits) {
  MemoryFileSystem files;
  put_checkpoint(files);
  RunFlags flags{.directory = "/model", .ranks = 4, .staging = "1MiB"};
  const PlanReport without = report_of(files, flags, "");
  EXPECT_FALSE(without.fits.has_value());
  EXPECT_FALSE(report_of(files, flags, "none").fits.has_value());
  for (const StrategyReport& strategy_report : without.strategies) {
    flags.strategy = strategy_report.strategy;
    const uint64_t peak = strategy_report.promise.node_peak_bytes(0);
    EXPECT_EQ(report_of(files, flags, std::to_string(peak)).fits, true) << strategy_report.strategy;
    EXPECT_EQ(report_of(files, flags, std::to_string(peak - 1)).fits, false)
        << strategy_report.strategy;
  }
}

TEST(Runs, TheInputsOfAPlanAreInWords) {
  MemoryFileSystem files;
  put_checkpoint(files);
  files.put("/model/config.json", R"({"model_type": "tiny"})");
  const RunFlags flags{.directory = "/model/",
                       .ranks = 6,
                       .ranks_per_node = 4,
                       .layout = "hsdp",
                       .mesh = "2x3",
                       .dtype = "fp32",
                       .optimizer = "adamw:fp32"};
  std::string text;
  for (const PageFact& fact : report_of(files, flags, "").inputs) {
    text += fact.name + ": " + fact.value + "\n";
  }
  EXPECT_EQ(text,
            "Model: model (tiny), 193 parameters\n"
            "Dtype: float32; stored as bfloat16\n"
            "Optimizer: adamw:fp32 over float32 parameters, as torch's AdamW over fp32 parameters: "
            "16 bytes per parameter\n"
            "Ranks: 6 on 2 nodes, 4 per node\n"
            "Strategy: own-shard\n"
            "Layout: hsdp, mesh 2x3\n");
}

TEST(Runs, TheStateOfAnOptimizerIsInWords) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const auto words = [&](const std::string& dtype, const std::string& format, bool on_device) {
    RunFlags flags{.directory = "/model", .dtype = dtype, .optimizer = "adamw:" + format};
    flags.on_device = on_device;
    return report_of(files, flags, "").optimizer;
  };
  EXPECT_EQ(
      words("float32", "bf16-moments", false),
      "adamw:bf16-moments over float32 parameters, as torch's AdamW over fp32 parameters, but "
      "with bf16 moments: 12 bytes per parameter");
  EXPECT_EQ(words("", "fp32", false),
            "adamw:fp32 over bfloat16 parameters, with separate fp32 masters, fp32 gradients and "
            "fp32 moments: 18 bytes per parameter");
  EXPECT_EQ(words("", "int8-moments-24", true),
            "adamw:int8-moments-24 over bfloat16 parameters, as upper half of 24-bit masters, with "
            "bf16 gradients and 8-bit moments: 7.0625 bytes per parameter on the host");
  EXPECT_EQ(report_of(files, {.directory = "/model"}, "").optimizer, "");
}

// A checkpoint of one tensor, of 4 Mi elements.
class Alternatives : public testing::Test {
 protected:
  void store(DType dtype) {
    files.make_directory("/model");
    const std::vector<TensorSpec> tensors = {{.fqn = "w", .dtype = dtype, .shape = {4096, 1024}}};
    SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  }
  static RunFlags flags_of(const std::string& dtype, const std::string& optimizer) {
    return {.directory = "/model",
            .ranks = 2,
            .dtype = dtype,
            .optimizer = optimizer,
            .staging = "1MiB"};
  }
  // What makes a run with `asked` fit the budget that a run with `smaller` needs.
  std::vector<Alternative> found(const RunFlags& asked, const RunFlags& smaller) {
    const uint64_t peak = report_of(files, smaller, "").requested().promise.node_peak_bytes(0);
    return report_of(files, asked, std::to_string(peak)).alternatives;
  }

  MemoryFileSystem files;
};

// Must fail if another dtype is not tried, or a lossy format comes before one that loses nothing,
// or a second node before a format.
TEST_F(Alternatives, AnotherDTypeKeepsMasterAndMoments) {
  store(DType::bf16);
  const RunFlags asked = flags_of("float32", "adamw:fp32");
  const auto all = found(asked, flags_of("", "adamw:fp32-split"));
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].flags, "--dtype bfloat16 --optimizer adamw:fp32-split");
  EXPECT_TRUE(all[0].is_lossless);
  EXPECT_EQ(all[0].dtype, DType::bf16);
  EXPECT_EQ(all[0].note,
            "14 bytes per parameter; same 32-bit master and moments; forward as with bf16 mixed "
            "precision; gradients arrive as bf16");
  EXPECT_EQ(all[1].flags, "--ranks-per-node 1");
  EXPECT_EQ(all[1].note, "");
}

// fp32 alone would need four nodes.
TEST_F(Alternatives, TheFewestNodesComeBeforeTheFewestChanges) {
  store(DType::bf16);
  RunFlags asked = flags_of("", "adamw:fp32"), smaller = flags_of("", "adamw:fp32-split");
  asked.ranks = smaller.ranks = 4;
  smaller.ranks_per_node = 2;
  const auto all = found(asked, smaller);
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.back().flags, "--optimizer adamw:fp32-split --ranks-per-node 2");
  for (const Alternative& alternative : all) EXPECT_NE(alternative.ranks_per_node, 1);
}

TEST_F(Alternatives, TheLeastLossComesBeforeASecondNode) {
  store(DType::bf16);
  const RunFlags asked = flags_of("float32", "adamw:fp32");
  const auto all = found(asked, flags_of("", "adamw:int8-moments"));
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].flags, "--dtype bfloat16 --optimizer adamw:int8-moments");
  EXPECT_FALSE(all[0].is_lossless);
  EXPECT_EQ(all[0].note,
            "8.0625 bytes per parameter; lossy: 8-bit moments; same 32-bit master; forward as with "
            "bf16 mixed precision; gradients arrive as bf16");
  EXPECT_EQ(all[1].ranks_per_node, 1);
  EXPECT_TRUE(all[1].is_lossless);
  const auto least = found(asked, flags_of("", "adamw:int8-moments-24"));
  ASSERT_FALSE(least.empty());
  EXPECT_EQ(least[0].note,
            "7.0625 bytes per parameter; lossy: 8-bit moments; 24-bit master; forward as with bf16 "
            "mixed precision; gradients arrive as bf16");
}

TEST_F(Alternatives, ASplitMasterKeepsAllButTheGradients) {
  store(DType::bf16);
  const auto all = found(flags_of("", "adamw:fp32"), flags_of("", "adamw:fp32-split"));
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].flags, "--optimizer adamw:fp32-split");
  EXPECT_EQ(all[0].dtype, std::nullopt);
  EXPECT_EQ(all[0].note,
            "14 bytes per parameter; same 32-bit master and moments; gradients are kept as bf16");
}

// Must fail if a change of dtype is said to lose nothing although it rounds the weights.
TEST_F(Alternatives, RoundedWeightsAreALoss) {
  store(DType::f32);
  const auto all =
      found(flags_of("", "adamw:int8-moments"), flags_of("bf16", "adamw:int8-moments"));
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].flags, "--dtype bfloat16");
  EXPECT_FALSE(all[0].is_lossless);
  EXPECT_EQ(all[0].note,
            "8.0625 bytes per parameter; lossy: float32 as stored is rounded to bf16; same 32-bit "
            "master and moments; forward as with bf16 mixed precision; gradients arrive as bf16");
  const auto loaded = found(flags_of("", "none"), flags_of("bf16", "none"));
  ASSERT_FALSE(loaded.empty());
  EXPECT_EQ(loaded[0].note,
            "lossy: the loaded weights have 16 bits, with no 32-bit master; float32 is rounded to "
            "bf16");
}

// Must fail if targets of the two runs are compared by their place: codes take the scales with
// them.
TEST_F(Alternatives, CodesThatAreDequantisedLeaveNoScales) {
  files.make_directory("/model");
  const std::vector<TensorSpec> tensors = {
      {.fqn = "a", .dtype = DType::f8_e4m3, .shape = {128, 128}},
      {.fqn = "a_scale_inv", .dtype = DType::f32, .shape = {1, 1}},
      {.fqn = "w", .dtype = DType::f32, .shape = {4096, 1024}}};
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  const auto all = found(flags_of("", "none"), flags_of("bf16", "none"));
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].flags, "--dtype bfloat16");
  EXPECT_EQ(all[0].note,
            "lossy: the loaded weights have 16 bits, with no 32-bit master; float32, float8_e4m3fn "
            "is rounded to bf16");
}

// Must fail if a change that does not fit is named, or one with more changes than needed.
TEST_F(Alternatives, OfDeepSpeedFit) {
  store(DType::bf16);
  files.put("/ds.json", R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": 2,)"
                        R"("offload_optimizer": {"device": "cpu", "pin_memory": false}}})");
  const auto planned = [&](const std::string& budget, bool protect) {
    return report_of(files, flags_of("", "none"), budget, {"/ds.json", 2, false, protect});
  };
  const DeepSpeedForecast protects = *planned("", true).deepspeed;
  const uint64_t least = protects.on_node(protects.peak_bytes());
  const std::vector<Alternative> enough = planned(std::to_string(least), false).alternatives;
  ASSERT_GE(enough.size(), 3U);
  EXPECT_EQ(enough[0].flags, "--protect");
  EXPECT_EQ(enough[0].peak_bytes, least);
  EXPECT_EQ(enough[1].flags, "--ranks-per-node 1");
  EXPECT_EQ(enough[2].flags, "--device --optimizer adamw:fp32");
  EXPECT_EQ(enough[2].who, kInPlaceOfDeepSpeed);
  const std::vector<Alternative> fewer = planned(std::to_string(least - 1), false).alternatives;
  ASSERT_GE(fewer.size(), 2U);
  EXPECT_EQ(fewer[0].flags, "--protect");
  EXPECT_EQ(fewer[0].config, R"({"zero_optimization":{"stage":3}})");
  for (const Alternative& alternative : fewer) EXPECT_LT(alternative.peak_bytes, least);
}

// Must fail if the host still holds the parameters, or no master of its own.
TEST_F(Alternatives, OfADeviceAreAboutTheHost) {
  store(DType::bf16);
  RunFlags flags = flags_of("", "adamw:fp32-split");
  flags.threads = 3;
  const Promise on_host = report_of(files, flags, "").requested().promise;
  flags.on_device = true;
  const PlanReport report = report_of(files, flags, "");
  EXPECT_EQ(report.device_bytes, (std::vector<uint64_t>{4 * kMiB, 4 * kMiB}));
  const Footprint host = report.requested().promise.phases.back().of_rank[0];
  EXPECT_EQ(host[Purpose::shards], 0U);
  EXPECT_EQ(host[Purpose::staging], 3U * 4 * kRingSlotBytes);
  EXPECT_EQ(host[Purpose::moments], on_host.phases.back().of_rank[0][Purpose::moments]);
  // 4 bytes per parameter, and not only the lower halves.
  EXPECT_GE(host[Purpose::master], 8 * kMiB);
  EXPECT_LT(on_host.phases.back().of_rank[0][Purpose::master], 5 * kMiB);
  flags.on_device = false;
  flags.destination = "discard";
  EXPECT_EQ(failure(files, flags), Category::unsupported);
}

// Must fail if the format is accepted with the figures of int8-moments and without a word.
TEST(Runs, AShortMasterOfAnFp32ParameterIsWarnedOf) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const auto warnings = [&](const std::string& format, const std::string& dtype) {
    const RunFlags flags{.directory = "/model", .dtype = dtype, .optimizer = "adamw:" + format};
    return open_run(files, flags).checkpoint.warnings;
  };
  EXPECT_EQ(warnings("int8-moments-24", "float32"),
            std::vector<std::string>{
                "adamw:int8-moments-24 is adamw:int8-moments for 2 of 2 trained parameters, which "
                "are not bfloat16: their master keeps 32 bits; the first is w (float32)"});
  EXPECT_TRUE(warnings("int8-moments-24", "").empty());
  EXPECT_TRUE(warnings("int8-moments", "float32").empty());
}

TEST(Runs, OnlyTheDefaultStagingShrinksToFit) {
  MemoryFileSystem files;
  put_checkpoint(files);
  const auto peak = [&](const std::string& staging, const std::string& budget) {
    // The load casts, so it needs staging.
    const RunFlags flags{.directory = "/model", .dtype = "float32", .staging = staging};
    const modicum::Run run = open_run(files, flags);
    const auto allowed = budget.empty() ? std::nullopt : budget_of(budget, 1);
    return plan_run(run, *run.options.strategy, allowed).promise.node_peak_bytes(0);
  };
  EXPECT_LT(peak("", "14MiB"), peak("", ""));
  EXPECT_EQ(peak("8MiB", "14MiB"), peak("8MiB", ""));
}

// Must fail if an empty recipe counts as no recipe, which loads each tensor as stored.
TEST(Runs, AnEmptyRecipeIsRefused) {
  MemoryFileSystem files;
  put_checkpoint(files);
  for (const char* text : {"", " \n", "{", "null", "{}"}) {
    files.put("/recipe.json", text);
    try {
      open_run(files, {.directory = "/model", .recipe = "/recipe.json"});
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::mismatch) << text;
      EXPECT_EQ(error.facts().file, "recipe.json");
    }
  }
}

// The error of a run of /model with this config.json; empty if it succeeds.
std::optional<Error> failure_with(const std::vector<TensorSpec>& tensors, const char* config,
                                  const RunFlags& flags = {.directory = "/model"},
                                  const char* recipe = nullptr) {
  MemoryFileSystem files;
  files.make_directory("/model");
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  if (config != nullptr) files.put("/model/config.json", config);
  if (recipe != nullptr) files.put("/recipe.json", recipe);
  try {
    open_run(files, flags);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TensorSpec spec_of(const char* name, DType dtype, std::vector<int64_t> shape) {
  return {.fqn = name, .dtype = dtype, .shape = std::move(shape)};
}

// Must fail if a tie is guessed although config.json can't be read, or if the run is refused
// although the names, a recipe or --untie determine the tie.
TEST(Runs, IfATieDependsOnABrokenConfigTheConfigsErrorIsThrown) {
  const TensorSpec embedding = spec_of("model.embed_tokens.weight", DType::bf16, {8, 4});
  const TensorSpec head = spec_of("lm_head.weight", DType::bf16, {8, 4});
  const TensorSpec other = spec_of("w", DType::bf16, {8, 4});
  for (const auto& tensors : {std::vector{embedding}, {head}, {embedding, head}}) {
    for (const char* broken : {"", R"({"tie_word_embeddings": "no"})"}) {
      const auto error = failure_with(tensors, broken);
      ASSERT_TRUE(error.has_value()) << tensors[0].fqn << broken;
      EXPECT_EQ(exit_code(error->category()), 10);
      EXPECT_EQ(error->facts().file, "config.json");
      EXPECT_FALSE(error->facts().tensor.empty());
    }
    EXPECT_FALSE(failure_with(tensors, "{}"));
    EXPECT_FALSE(failure_with(tensors, nullptr));
    EXPECT_FALSE(failure_with(tensors, R"({"quantization_config": 7})"));
  }
  EXPECT_FALSE(failure_with({other}, ""));
  EXPECT_FALSE(failure_with({embedding, head}, "", {.directory = "/model", .untie = true}));
  EXPECT_TRUE(failure_with({embedding}, "", {.directory = "/model", .untie = true}));
  EXPECT_FALSE(failure_with({embedding}, "", {.directory = "/model", .recipe = "/recipe.json"},
                            R"({"targets": {"e": {"op": "stored",
                                "name": "model.embed_tokens.weight"}}})"));
}

// Must fail if the block size is guessed although config.json can't be read.
TEST(Runs, IfABlockSizeDependsOnABrokenConfigTheConfigsErrorIsThrown) {
  const std::vector<TensorSpec> blocks = {spec_of("w", DType::f8_e4m3, {192, 128}),
                                          spec_of("w_scale_inv", DType::f32, {2, 1})};
  const std::vector<TensorSpec> rows = {spec_of("w", DType::f8_e4m3, {192, 128}),
                                        spec_of("w_scale_inv", DType::f32, {192, 1})};
  const RunFlags numbers{.directory = "/model", .dtype = "bfloat16"};
  for (const char* broken : {"", "{", R"({"quantization_config": {"weight_block_size": "128"}})"}) {
    const auto error = failure_with(blocks, broken, numbers);
    ASSERT_TRUE(error.has_value()) << broken;
    EXPECT_EQ(exit_code(error->category()), 10) << error->what();
    EXPECT_EQ(error->facts().file, "config.json");
    EXPECT_EQ(error->facts().tensor, "w");
    EXPECT_FALSE(failure_with(blocks, broken)) << "codes are loaded unchanged";
    EXPECT_FALSE(failure_with(rows, broken, numbers)) << "only one size gives this grid";
  }
  EXPECT_FALSE(failure_with(blocks, R"({"quantization_config": {"weight_block_size": [128, 128]}})",
                            numbers));
}

// The overread ratio is bytes read / bytes needed. For contiguous shards almost all bytes are
// needed; the columns of a narrow matrix are read together with the gaps between them.
TEST(Runs, ThePlanReportsTheOverread) {
  MemoryFileSystem files;
  files.make_directory("/model");
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < 40; ++i) {
    tensors.push_back({.fqn = "w" + std::to_string(i), .dtype = DType::bf16, .shape = {i, 64}});
  }
  SafetensorsWriter(files, "/model/model.safetensors", tensors).finish();
  RunFlags flags{.directory = "/model", .ranks = 4};
  const auto ratio_of = [&](std::string_view strategy) {
    for (const StrategyReport& strategy_report : report_of(files, flags, "").strategies) {
      if (strategy_report.strategy == strategy) return strategy_report.overread_ratio();
    }
    return 0.0;
  };
  EXPECT_GE(ratio_of("own-shard"), 1);
  EXPECT_LE(ratio_of("own-shard"), 1.02);
  EXPECT_DOUBLE_EQ(ratio_of("rank0-broadcast"), 1);
  EXPECT_DOUBLE_EQ(ratio_of("full-per-rank"), 4);
  flags.shard_dim = 1;  // runs of 32 bytes, 128 apart
  EXPECT_GT(ratio_of("own-shard"), 3);
  EXPECT_LT(ratio_of("own-shard"), 4);
  EXPECT_DOUBLE_EQ(ratio_of("full-per-rank"), 4);
}

}  // namespace
}  // namespace modicum
