// Compares the forecast with measurements of DeepSpeed 0.19.8, and tests which settings are
// refused. Catches: a line is missing, or is counted without workers although it is the cost of a
// fork; pageable buffers are rounded; a key that changes memory is ignored; an error names only one
// of the values that are missing.
#include "modicum/baselines/deepspeed.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "modicum/json/json_values_double.h"
#include "modicum/spec/spec.h"

namespace modicum {
namespace {

// The sizes of a model with 201 million elements: eleven tensors of 32,768 x 512, and a smaller
// one.
std::vector<int64_t> measured_model() {
  std::vector<int64_t> sizes(11, int64_t{1} << 24);
  sizes.push_back(201000000 - 11 * (int64_t{1} << 24));
  return sizes;
}

std::string config_of(int stage, const std::string& zero, const std::string& root = "") {
  return R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": )" + std::to_string(stage) +
         zero + "}" + root + "}";
}
const std::string kPageable = R"(, "offload_optimizer": {"device": "cpu", "pin_memory": false})";
const std::string kPinned = R"(, "offload_optimizer": {"device": "cpu"})";

DeepSpeedForecast forecast(const std::string& config, int workers = 0, bool persistent = false,
                           int ranks = 1) {
  return deepspeed_forecast(read_deepspeed(config, ranks), measured_model(),
                            {ranks, ranks, workers, persistent});
}

double per_param(const DeepSpeedForecast& forecast, std::string_view phase) {
  return static_cast<double>(forecast.sum_at(phase).bytes) /
         static_cast<double>(forecast.params_of_rank);
}

// The numbers are the measured bytes per parameter of the process tree of one rank. The tolerances
// are at most 1.3 %.
TEST(DeepSpeed, TheForecastMatchesTheMeasurements) {
  const std::string config = config_of(2, kPageable);
  EXPECT_NEAR(per_param(forecast(config), "step_1"), 18.76, 0.02);
  EXPECT_NEAR(per_param(forecast(config), "epoch_2"), 18.76, 0.02);
  EXPECT_NEAR(per_param(forecast(config, 2, true), "epoch_2"), 28.91, 0.2);
  EXPECT_NEAR(per_param(forecast(config, 2, false), "epoch_2"), 36.89, 0.2);
  EXPECT_NEAR(per_param(forecast(config, 1, false), "epoch_2"), 36.89, 0.2)
      << "one worker costs as much as two, since workers share the copied pages";
  const std::string accumulates = config_of(2, kPageable, R"(, "gradient_accumulation_steps": 4)");
  EXPECT_NEAR(per_param(forecast(accumulates), "step_1"), 20.76, 0.02);
  EXPECT_NEAR(per_param(forecast(accumulates, 2, true), "step_1"), 31.08, 0.4);
}

// Must fail if bytes that don't grow with the model count in the figure per parameter.
TEST(DeepSpeed, FixedBytesAreNotPerParameter) {
  const DeepSpeedForecast alone = forecast(config_of(2, kPageable));
  const DeepSpeedForecast::Sum sum = alone.sum_at("step_1");
  EXPECT_DOUBLE_EQ(alone.per_param(sum), 18);
  EXPECT_EQ(sum.bytes, 18 * alone.params_of_rank + sum.fixed_bytes);
  EXPECT_GT(sum.fixed_bytes, 100'000'000U);
}

TEST(DeepSpeed, EachLineHasItsOwner) {
  const DeepSpeedForecast forked = forecast(config_of(2, kPageable), 2, false, 2);
  EXPECT_EQ(forked.params, 201000000U);
  EXPECT_EQ(forked.params_of_rank, 100500000U);
  // A fork copies the master (4), the staging (2), the gradients (4) and the moments (8). Step 1
  // adds the moments and the copies of the other three.
  EXPECT_EQ(forked.sum_of("fork").bytes, 18 * forked.params_of_rank);
  EXPECT_EQ(forked.sum_at("step_1").bytes - forked.sum_at("init").bytes,
            (8 + 10) * forked.params_of_rank);
  EXPECT_EQ(forked.sum_of("pinned rounding").bytes, 0U);
  uint64_t sum = 0;
  for (const DeepSpeedForecast::Line& line : forked.lines) sum += line.bytes;
  EXPECT_EQ(sum, forked.sum_at("epoch_2").bytes);
}

// Must fail if protected buffers count as copied, or anything else changes with --protect.
TEST(DeepSpeed, ProtectedBuffersAreNotCopied) {
  for (const std::string& offload : {kPageable, kPinned}) {
    const DeepSpeedConfig config = read_deepspeed(config_of(2, offload), 1);
    DeepSpeedWorld world{.workers = 2};
    EXPECT_GT(deepspeed_forecast(config, measured_model(), world).sum_of("fork").bytes, 0U);
    world.protect = true;
    const DeepSpeedForecast protects = deepspeed_forecast(config, measured_model(), world);
    EXPECT_EQ(protects.sum_of("fork").bytes, 0U);
    EXPECT_EQ(protects.peak_bytes(), forecast(config_of(2, offload)).peak_bytes());
  }
}

TEST(DeepSpeed, APatchHasWhatDiffers) {
  const std::string param = R"(, "offload_param": {"device": "cpu"})";
  const DeepSpeedConfig from = read_deepspeed(config_of(3, kPinned + param), 1);
  EXPECT_EQ(deepspeed_patch(from, from), "");
  DeepSpeedConfig to = from;
  to.optimizer.pin_memory = to.param.pin_memory = false;
  EXPECT_EQ(deepspeed_patch(from, to), R"({"zero_optimization":{"offload_optimizer":)"
                                       R"({"pin_memory":false},"offload_param":)"
                                       R"({"pin_memory":false}}})");
  to = from;
  to.stage = 2;
  to.param.to_cpu = false;
  EXPECT_EQ(deepspeed_patch(from, to),
            R"({"zero_optimization":{"stage":2,"offload_param":{"device":"none"}}})");
}

// Each pinned buffer is rounded to a power of two; forks don't copy it.
TEST(DeepSpeed, PinnedBuffersAreRoundedAndNotForked) {
  const DeepSpeedForecast pinned = forecast(config_of(2, kPinned), 2, false);
  const uint64_t params = 201000000;
  // Master and gradients are rounded to 2^30 bytes, the staging to 2^29. The temp_grad_buffer has
  // 2^25 bytes and is not rounded.
  const uint64_t expected =
      2 * ((uint64_t{1} << 30) - 4 * params) + (uint64_t{1} << 29) - 2 * params;
  EXPECT_EQ(pinned.sum_of("pinned rounding").bytes, expected);
  EXPECT_EQ(pinned.sum_of("fork").bytes, 8 * params) << "the moments";
  // Accumulated gradients are a buffer per parameter: eleven of 2^25 bytes, and a last one.
  const std::string twice = R"(, "gradient_accumulation_steps": 2)";
  const uint64_t last = 2 * (params - 11 * (uint64_t{1} << 24));
  EXPECT_EQ(forecast(config_of(2, kPinned, twice)).sum_of("pinned rounding").bytes,
            expected + (uint64_t{1} << 25) - last);
}

// Must fail if a rank is counted with its part of a parameter that is divided among ranks:
// DeepSpeed allocates `torch.zeros(param.numel())` on each of them.
TEST(DeepSpeed, ARankAccumulatesWholeParameters) {
  const std::string config = config_of(2, kPageable, R"(, "gradient_accumulation_steps": 2)");
  const auto accumulated = [&](const std::vector<int64_t>& sizes, int ranks, int ranks_of_node) {
    const DeepSpeedForecast found =
        deepspeed_forecast(read_deepspeed(config, ranks), sizes, {ranks, ranks_of_node, 0, false});
    for (const DeepSpeedForecast::Line& line : found.lines) {
      if (line.name == "gradients accumulated in 16 bits") return line.bytes;
    }
    return uint64_t{0};
  };
  EXPECT_EQ(accumulated({10, 10, 10}, 1, 1), 2U * 30);
  EXPECT_EQ(accumulated({10, 10, 10}, 2, 2), 2U * 20);
  EXPECT_EQ(accumulated({10, 10, 10}, 3, 3), 2U * 10);
  // Four ranks of 26 elements: the first three have a part of the large one, the last also the
  // rest.
  EXPECT_EQ(accumulated({100, 1, 1, 1, 1}, 4, 2), 2U * (100 + 104) / 2);
  EXPECT_EQ(accumulated({100, 1, 1, 1, 1}, 4, 4), 2U * (300 + 104) / 4);
}

TEST(DeepSpeed, Stage3HasOtherBuffers) {
  const DeepSpeedForecast alone = forecast(config_of(3, kPageable));
  EXPECT_EQ(alone.sum_at("step_1").bytes - alone.sum_at("init").bytes, 8 * alone.params_of_rank);
  EXPECT_NEAR(per_param(alone, "step_1"), 18.58, 0.01);
  const std::string param = R"(, "offload_param": {"device": "cpu", "pin_memory": false})";
  EXPECT_NEAR(per_param(forecast(config_of(3, kPageable + param)), "step_1"), 20.58, 0.01);
}

TEST(DeepSpeed, WithoutOffloadTheHostHoldsNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_TRUE(forecast(config_of(stage, "")).lines.empty());
  }
}

TEST(DeepSpeed, ReportsOurFormatsForComparison) {
  const DeepSpeedForecast result = forecast(config_of(2, kPageable), 0, false, 4);
  ASSERT_EQ(result.ours.size(), state_formats().size());
  EXPECT_NEAR(result.per_param({result.ours.front().bytes}), 16, 0.01);
  EXPECT_NEAR(result.per_param({result.ours.back().bytes}), 7.0625, 0.01);
}

TEST(DeepSpeed, AccumulationIsDerivedFromTheBatchSizes) {
  const auto steps = [](const std::string& root, int ranks) {
    return read_deepspeed(config_of(2, kPageable, root), ranks).accumulation_steps;
  };
  EXPECT_EQ(steps("", 4), 1);
  EXPECT_EQ(steps(R"(, "gradient_accumulation_steps": 8)", 4), 8);
  const std::string batch = R"(, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4)";
  EXPECT_EQ(steps(batch, 4), 4);
  const auto refusal = [&](const std::string& root, int ranks) -> std::string {
    try {
      steps(root, ranks);
    } catch (const Error& error) {
      return error.what_happened();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(batch, 3),
            "train_batch_size 64 is not a multiple of train_micro_batch_size_per_gpu 4 x 3 ranks");
  EXPECT_EQ(refusal(batch + R"(, "gradient_accumulation_steps": 2)", 4),
            "train_batch_size 64 with train_micro_batch_size_per_gpu 4 and 4 ranks needs "
            "gradient_accumulation_steps 4, got 2");
}

// What read_deepspeed throws, UNSUPPORTED, for a configuration of one rank.
std::string refusal(const std::string& config) {
  try {
    read_deepspeed(config, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::unsupported) << error.what();
    return error.what();
  }
  return "accepted";
}

// A configuration for transformers leaves values to the Trainer.
TEST(DeepSpeed, OneErrorNamesAllValuesThatAreMissing) {
  EXPECT_EQ(
      refusal(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                  "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
                  "fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": "auto"},
                  "zero_optimization": {"stage": "auto", "sub_group_size": "auto",
                  "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}}})"),
      "UNSUPPORTED: the forecast needs values for 'gradient_accumulation_steps' (the number of "
      "--gradient_accumulation_steps; then batch sizes may be \"auto\"), 'bf16.enabled' (true in "
      "bf16 or in fp16: --bf16 or --fp16), 'fp16.enabled' (true in bf16 or in fp16: --bf16 or "
      "--fp16), 'zero_optimization.stage' (0 to 3), 'zero_optimization.sub_group_size' (a number), "
      "'zero_optimization.offload_optimizer.pin_memory' (true or false) (expected the Trainer's "
      "values in ds_config.json, or in Python modicum.torch.deepspeed.config_of(arguments), got "
      "gradient_accumulation_steps: \"auto\", bf16.enabled: \"auto\", fp16.enabled: \"auto\", "
      "zero_optimization.stage: \"auto\", zero_optimization.sub_group_size: \"auto\", "
      "zero_optimization.offload_optimizer.pin_memory: \"auto\")");
  const std::string absent = refusal(R"({"train_batch_size": "auto"})");
  EXPECT_NE(absent.find("got gradient_accumulation_steps: none, bf16.enabled: neither"),
            std::string::npos)
      << absent;
}

TEST(DeepSpeed, AutoIsAcceptedWhereItDoesNotChangeMemory) {
  EXPECT_EQ(refusal(R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                        "gradient_accumulation_steps": 4, "gradient_clipping": "auto",
                        "bf16": {"enabled": true}, "fp16": {"enabled": "auto"}})"),
            "accepted");
}

TEST(DeepSpeed, AGivenBaselineIsALine) {
  const std::vector<int64_t> sizes = {1 << 20};
  const DeepSpeedConfig config = read_deepspeed(config_of(2, kPageable), 1);
  const DeepSpeedForecast without = deepspeed_forecast(config, sizes, {});
  const DeepSpeedForecast with = deepspeed_forecast(config, sizes, {.baseline_bytes = kGiB});
  EXPECT_EQ(without.sum_of("process").bytes, 0U);
  EXPECT_EQ(with.sum_of("process").bytes, kGiB);
  EXPECT_EQ(with.peak_bytes() - without.peak_bytes(), kGiB);
}

TEST(DeepSpeed, SettingsOfUnknownEffectAreRefusedByName) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {config_of(3, kPinned + R"(, "offload_param": {"device": "nvme"})"), "offload_param to nvme"},
      {config_of(2, R"(, "offload_optimizer": {"device": "nvme"})"), "offload_optimizer to nvme"},
      {config_of(2, R"(, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"), "ratio"},
      {config_of(2, kPinned + R"(, "zenflow": {"topk_ratio": 0.1})"), "zero_optimization.zenflow"},
      {R"({"fp16": {"enabled": true, "unknown": 1}})", "'fp16.unknown'"},
      {config_of(2, kPinned, R"(, "data_types": {"grad_accum_dtype": "fp32"})"), "data_types"},
      {config_of(2, kPinned, R"(, "optimizer": {"type": "Lion"})"), "Lion"},
      {config_of(2, kPinned, R"(, "gradient_accumulation_steps": "auto")"), "accumulation_steps"},
      {config_of(2, kPinned, R"(, "gradient_accumulation_steps": "auto")"),
       "expected the Trainer's values in ds_config.json"},
      {config_of(0, kPinned), "stage 0"},
      {R"({"zero_optimization": {"stage": 2}})", "bf16.enabled: neither it nor fp16.enabled"}};
  for (const auto& [config, named] : cases) {
    EXPECT_NE(refusal(config).find(named), std::string::npos) << refusal(config);
  }
  EXPECT_EQ(refusal(config_of(2, kPinned + R"(, "zenflow": null, "overlap_comm": true)")),
            "accepted");
}

// Gives every kind of JSON value to keys of every section, and to an unknown key. `sections` has
// the text before and after a member, and the keys.
TEST(DeepSpeed, AnyJsonAtAnyKeyIsAcceptedOrRefused) {
  const std::vector<std::pair<std::vector<std::string>, std::vector<const char*>>> sections = {
      {{"", ""},
       {"gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu",
        "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "unknown"}},
      {{R"("zero_optimization": {)", "}"},
       {"stage", "sub_group_size", "offload_optimizer", "offload_param", "overlap_comm",
        "unknown"}},
      {{R"("zero_optimization": {"stage": 3, "offload_optimizer": {)", "}}"},
       {"pin_memory", "device", "ratio", "buffer_count", "unknown"}},
      {{R"("bf16": {)", "}"}, {"enabled", "loss_scale", "unknown"}},
      {{R"("optimizer": {)", "}"}, {"type", "params", "unknown"}}};
  std::vector<std::string> configs;
  for (const char* value : kJsonValues) {
    configs.emplace_back(value);
    for (const auto& [around, keys] : sections) {
      for (const char* key : keys) {
        const std::string member = around[0] + "\"" + key + "\": " + value + around[1];
        configs.push_back("{" + member + "}");
        if (!member.starts_with("\"bf16\"")) {
          configs.push_back(R"({"bf16": {"enabled": true}, )" + member + "}");
        }
      }
    }
  }
  for (const std::string& config : configs) {
    try {
      read_deepspeed(config, 2);
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.category()), 2) << config << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace modicum
