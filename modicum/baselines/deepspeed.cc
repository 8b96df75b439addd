#include "modicum/baselines/deepspeed.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "modicum/json/json.h"
#include "modicum/optim/optim.h"

namespace modicum {
namespace {

[[noreturn]] void unsupported(const std::string& key) {
  fail(Category::unsupported,
       fmt::format("DeepSpeed's '{}' has an unknown effect on memory", printable(key)));
}

using Names = std::vector<std::string_view>;
// The keys of a section that have no effect on the forecast.
const Names& neutral_of(std::string_view section) {
  static const Names root = {"gradient_clipping",
                             "steps_per_print",
                             "wall_clock_breakdown",
                             "prescale_gradients",
                             "gradient_predivide_factor",
                             "communication_data_type",
                             "scheduler",
                             "dump_state",
                             "flops_profiler",
                             "tensorboard",
                             "wandb",
                             "csv_monitor",
                             "comms_logger",
                             "zero_allow_untested_optimizer",
                             "zero_force_ds_cpu_optimizer",
                             "memory_breakdown"};
  static const Names zero = {"contiguous_gradients",
                             "reduce_scatter",
                             "reduce_bucket_size",
                             "allgather_partitions",
                             "allgather_bucket_size",
                             "overlap_comm",
                             "load_from_fp32_weights",
                             "elastic_checkpoint",
                             "round_robin_gradients",
                             "ignore_unused_parameters",
                             "use_multi_rank_bucket_allreduce",
                             "stage3_prefetch_bucket_size",
                             "stage3_param_persistence_threshold",
                             "stage3_model_persistence_threshold",
                             "stage3_max_live_parameters",
                             "stage3_max_reuse_distance",
                             "stage3_gather_16bit_weights_on_model_save",
                             "stage3_gather_fp16_weights_on_model_save"};
  static const Names offload = {"buffer_count", "buffer_size",   "max_in_cpu",
                                "fast_init",    "pipeline_read", "pipeline_write"};
  static const Names precision = {"loss_scale",
                                  "initial_scale_power",
                                  "loss_scale_window",
                                  "hysteresis",
                                  "min_loss_scale",
                                  "auto_cast",
                                  "consecutive_hysteresis",
                                  "check_grad_overflow",
                                  "immediate_grad_update"};
  if (section == "zero_optimization") return zero;
  if (section.starts_with("offload_")) return offload;
  if (section == "bf16" || section == "fp16") return precision;
  return root;
}

// Reads a configuration member by member, and refuses settings with an unknown effect.
class ConfigReader {
 public:
  DeepSpeedConfig read(JsonValue& root, int ranks) {
    root.object([&](std::string_view key, JsonValue& value) { of_root(key, value); });
    require_values();
    if (config_.stage == 0 && config_.optimizer.to_cpu) unsupported("offload_optimizer at stage 0");
    if (config_.stage < 3 && config_.param.to_cpu) unsupported("offload_param below stage 3");
    if (config_.param.to_cpu && !config_.optimizer.to_cpu) {
      unsupported("offload_param without offload_optimizer");
    }
    config_.accumulation_steps = accumulation_steps(ranks);
    return config_;
  }

 private:
  void of_root(std::string_view key, JsonValue& value) {
    if (key == kAccumulation) return number(key, value, accumulation_, kAccumulationRemedy);
    if (key == "train_batch_size") return batch_size(key, value, batch_);
    if (key == "train_micro_batch_size_per_gpu") return batch_size(key, value, micro_batch_);
    if (key == "zero_optimization") {
      value.object([&](std::string_view name, JsonValue& member) { of_zero(name, member); });
    } else if (key == "bf16" || key == "fp16") {
      value.object(
          [&](std::string_view name, JsonValue& member) { of_precision(key, name, member); });
    } else if (key == "optimizer") {
      value.object([&](std::string_view name, JsonValue& member) { of_optimizer(name, member); });
    } else {
      neutral("", key, value);
    }
  }

  void of_zero(std::string_view key, JsonValue& value) {
    if (key == "stage") {
      int64_t stage = 0;
      number("zero_optimization.stage", value, stage, "0 to 3");
      if (stage > 3) {
        fail(Category::usage, fmt::format("expected a ZeRO stage from 0 to 3, got {}", stage));
      }
      config_.stage = static_cast<int>(stage);
    } else if (key == "sub_group_size") {
      number("zero_optimization.sub_group_size", value, config_.sub_group_size, "a number");
      config_.sub_group_size = std::max<int64_t>(1, config_.sub_group_size);
    } else if (key == "offload_optimizer") {
      offload(key, value, config_.optimizer);
    } else if (key == "offload_param") {
      offload(key, value, config_.param);
    } else {
      neutral("zero_optimization", key, value);
    }
  }

  void offload(std::string_view section, JsonValue& value, DeepSpeedConfig::Offload& to) {
    if (value.kind() == JsonValue::Kind::null) return value.null();
    value.object([&](std::string_view key, JsonValue& member) {
      if (key == "pin_memory") {
        flag(fmt::format("zero_optimization.{}.pin_memory", section), member, to.pin_memory,
             "true or false");
      } else if (key == "device") {
        const std::string device = member.string();
        if (device != "cpu" && device != "none") {
          unsupported(fmt::format("{} to {}", section, device));
        }
        to.to_cpu = device == "cpu";
      } else if (key == "ratio") {
        if (member.number() != 1.0) unsupported(fmt::format("{}.ratio", section));
      } else {
        neutral(section, key, member);
      }
    });
  }

  // `section`: bf16 or fp16.
  void of_precision(std::string_view section, std::string_view key, JsonValue& value) {
    if (key == "enabled") {
      bool is_enabled = false;
      flag(fmt::format("{}.enabled", section), value, is_enabled, kPrecisionRemedy);
      low_precision_ |= is_enabled;
    } else {
      neutral(section, key, value);
    }
  }

  void of_optimizer(std::string_view key, JsonValue& value) {
    if (key == "params") return value.skip();
    if (key != "type") unsupported(fmt::format("optimizer.{}", key));
    const std::string type = value.string();
    if (type != "Adam" && type != "AdamW") unsupported(fmt::format("optimizer.type {}", type));
  }

  // Ignores keys without an effect, and unknown keys that are false or null. Refuses all others.
  static void neutral(std::string_view section, std::string_view key, JsonValue& value) {
    const Names& names = neutral_of(section);
    if (std::find(names.begin(), names.end(), key) != names.end()) return value.skip();
    const JsonValue::Kind kind = value.kind();
    const bool is_boolean = kind == JsonValue::Kind::boolean;
    if (is_boolean ? !value.boolean() : kind == JsonValue::Kind::null) return;
    const std::string prefix = section.empty() ? "" : fmt::format("{}.", section);
    unsupported(fmt::format("{}{}", prefix, key));
  }

  // A value that the forecast needs, and that the file lacks or leaves as a text such as "auto".
  struct MissingValue {
    std::string key;
    std::string got;
    std::string_view remedy;
  };

  // Reads the value and notes it as missing if it is a text; else returns false.
  bool noted_missing(std::string_view key, JsonValue& value, std::string_view remedy) {
    if (value.kind() != JsonValue::Kind::string) return false;
    missing_.push_back(
        {std::string(key), fmt::format("\"{}\"", printable(value.string())), remedy});
    return true;
  }
  void flag(std::string_view key, JsonValue& value, bool& to, std::string_view remedy) {
    if (!noted_missing(key, value, remedy)) to = value.boolean();
  }
  // Numbers may be written as 5e8.
  template <typename Number>
  void number(std::string_view key, JsonValue& value, Number& to, std::string_view remedy) {
    if (noted_missing(key, value, remedy)) return;
    const double got = value.number();
    if (!(got >= 0 && got < 1e18)) {
      fail(Category::usage, fmt::format("expected a count for {}, got {}", key, got));
    }
    to = static_cast<int64_t>(got);
  }
  // A batch size is needed only if it determines the accumulation steps.
  void batch_size(std::string_view key, JsonValue& value, std::optional<int64_t>& to) {
    const size_t before = missing_.size();
    number(key, value, to, "");
    has_open_batch_ |= missing_.size() > before;
    missing_.resize(before);
  }

  // Throws one error for all values that are missing.
  void require_values() {
    const auto is_missing = [&](std::string_view key) {
      return std::any_of(missing_.begin(), missing_.end(),
                         [key](const MissingValue& missing) { return missing.key == key; });
    };
    if (has_open_batch_ && !accumulation_ && !is_missing(kAccumulation)) {
      missing_.push_back({std::string(kAccumulation), "none", kAccumulationRemedy});
    }
    if (low_precision_) {  // then "auto" in the other section can only mean false
      std::erase_if(missing_,
                    [](const MissingValue& missing) { return missing.remedy == kPrecisionRemedy; });
    } else if (!is_missing("bf16.enabled") && !is_missing("fp16.enabled")) {
      missing_.push_back({"bf16.enabled", "neither it nor fp16.enabled", kPrecisionRemedy});
    }
    if (missing_.empty()) return;
    std::string keys, got;
    for (const MissingValue& missing : missing_) {
      const std::string_view comma = keys.empty() ? "" : ", ";
      keys += fmt::format("{}'{}' ({})", comma, missing.key, missing.remedy);
      got += fmt::format("{}{}: {}", comma, missing.key, missing.got);
    }
    fail(Category::unsupported, fmt::format("the forecast needs values for {}", keys),
         {.expected = "the Trainer's values in ds_config.json, or in Python "
                      "modicum.torch.deepspeed.config_of(arguments)",
          .got = std::move(got)});
  }

  // DeepSpeed's rule: a batch is micro batches x accumulation steps x ranks.
  int64_t accumulation_steps(int ranks) const {
    if (!batch_ || !micro_batch_) return std::max<int64_t>(1, accumulation_.value_or(1));
    // Each count is below 1e18, but their product may overflow. `per_step` is then INT64_MAX, and
    // `steps` is 0, which is refused.
    const int64_t per_step =
        checked_mul(std::max<int64_t>(1, *micro_batch_), int64_t{ranks}).value_or(INT64_MAX);
    const int64_t steps = *batch_ / per_step;
    if (steps == 0 || steps * per_step != *batch_) {
      fail(Category::usage, fmt::format("train_batch_size {} is not a multiple of "
                                        "train_micro_batch_size_per_gpu {} x {} ranks",
                                        *batch_, *micro_batch_, ranks));
    }
    if (steps != accumulation_.value_or(steps)) {
      fail(Category::usage,
           fmt::format("train_batch_size {} with train_micro_batch_size_per_gpu {} and {} ranks "
                       "needs gradient_accumulation_steps {}, got {}",
                       *batch_, *micro_batch_, ranks, steps, *accumulation_));
    }
    return steps;
  }

  static constexpr std::string_view kAccumulation = "gradient_accumulation_steps";
  static constexpr std::string_view kAccumulationRemedy =
      "the number of --gradient_accumulation_steps; then batch sizes may be \"auto\"";
  static constexpr std::string_view kPrecisionRemedy = "true in bf16 or in fp16: --bf16 or --fp16";

  DeepSpeedConfig config_;
  bool low_precision_ = false;
  bool has_open_batch_ = false;  // a batch size is "auto"
  std::optional<int64_t> accumulation_, batch_, micro_batch_;
  std::vector<MissingValue> missing_;
};

// ---- the lines of the forecast

// Bytes of allocator and interpreter after the initialisation. They do not depend on the model:
// measured at 67 and at 201 million parameters with torch 2.13. torch 2.15 holds 10 MiB more.
constexpr uint64_t kFixedBytes = 117000000;

constexpr std::string_view kAccumulated = "gradients accumulated in 16 bits";
constexpr std::string_view kTempGradBuffer =
    "temp_grad_buffer of the largest parameter, never read";

// A buffer of a rank. The forecast's lines are computed from these buffers, except those for the
// fixed bytes and for temp_grad_buffer.
struct PerParam {
  std::string_view name;
  uint64_t bytes = 0;        // per parameter of the rank
  std::string_view phase;    // in which the buffer is allocated
  std::string_view purpose;  // see DeepSpeedForecast::Line
  bool is_pinned = false;
};

std::vector<PerParam> buffers_of(const DeepSpeedConfig& config) {
  const bool pins = config.optimizer.pin_memory;
  std::vector<PerParam> buffers = {{"fp32 master", 4, "init", "master", pins}};
  if (config.stage < 3) {
    buffers.push_back({"16-bit staging of the whole partition", 2, "init", "staging", pins});
    buffers.push_back({"fp32 gradients", 4, "init", "grad", pins});
    if (config.accumulation_steps > 1) {
      buffers.push_back({kAccumulated, 2, "step_1", "grad", pins});
    }
  } else {
    buffers.push_back({"fp32 gradients of the sub-groups", 4, "init", "grad", pins});
    buffers.push_back({"gradient partitions in 16 bits", 2, "init", "grad", pins});
    if (config.param.to_cpu) {
      buffers.push_back({"16-bit parameters", 2, "init", "shards", config.param.pin_memory});
    }
  }
  buffers.push_back({"moments", 8, "step_1", "moments", false});
  return buffers;
}

// The bytes that torch's pinned allocator adds: it rounds each request up to a power of two.
uint64_t rounding_of(uint64_t bytes) noexcept { return std::bit_ceil(bytes) - bytes; }

class Forecast {
 public:
  Forecast(const DeepSpeedConfig& config, std::span<const int64_t> sizes,
           const DeepSpeedWorld& world)
      : config_(config), sizes_(sizes), ranks_(world.ranks), baseline_bytes_(world.baseline_bytes) {
    forecast_.version = kDeepSpeedVersion;
    forecast_.stage = config.stage;
    forecast_.ranks_of_node = world.ranks_of_node;
    for (const int64_t size : sizes) {
      forecast_.params += static_cast<uint64_t>(size);
      largest_ = std::max(largest_, static_cast<uint64_t>(size));
      if (config_.stage == 3)
        forecast_.params_of_rank += static_cast<uint64_t>(ceil_div(size, ranks_));
    }
    if (config_.stage == 3) return;
    const auto total = static_cast<int64_t>(forecast_.params);
    forecast_.params_of_rank =
        static_cast<uint64_t>(config_.stage == 0 ? total : ceil_div(total, ranks_));
    count_accumulated(config_.stage == 0 ? 1 : world.ranks_of_node);
  }

  void own_lines() {
    for (const PerParam& buffer : buffers_of(config_)) {
      add({buffer.name, "deepspeed", buffer.phase, buffer.purpose},
          buffer.bytes * elements_of(buffer));
    }
    if (config_.stage < 3) {
      add({kTempGradBuffer, "deepspeed", "init", "staging", true}, 2 * largest_);
    }
    add({"fixed", "deepspeed", "init", "process", true}, kFixedBytes);
    if (baseline_bytes_ == 0) return;
    add({"process before DeepSpeed (--baseline)", "process", "init", "process", true},
        baseline_bytes_);
  }

  void pinned_lines() {
    for (const PerParam& buffer : buffers_of(config_)) {
      if (!buffer.is_pinned) continue;
      add({buffer.name, "pinned rounding", buffer.phase, "pinned_rounding"},
          rounding_of_all(buffer));
    }
    if (config_.stage < 3 && config_.optimizer.pin_memory) {
      add({kTempGradBuffer, "pinned rounding", "init", "pinned_rounding", true},
          rounding_of(2 * largest_));
    }
  }

  // Pages written before a fork are copied when they are written again, and a step writes all of
  // them. Workers are forked before step 1. If they are not persistent, they are forked again
  // before each epoch, and then the buffers of step 1 are copied, too. Pinned pages belong to the
  // driver and are not copied.
  void fork_lines(bool persistent) {
    for (const PerParam& buffer : buffers_of(config_)) {
      if (buffer.is_pinned) continue;
      const uint64_t bytes = buffer.bytes * elements_of(buffer);
      const std::string name = fmt::format("{}, copied when written", buffer.name);
      if (buffer.phase == "init") {
        add({name, "fork", "step_1", "fork"}, bytes);
      } else if (!persistent) {
        add({name, "fork", "epoch_2", "fork"}, bytes);
      }
    }
  }

  void our_lines() {
    for (const StateFormatRow& row : state_formats()) {
      const ShardSpec shard{.fqn = "all",
                            .runs = {{0, static_cast<int64_t>(forecast_.params_of_rank)}}};
      AdamWCount count(row.format, {AdamOptions{}});
      if (forecast_.params_of_rank > 0) count.add(shard, true);
      forecast_.ours.push_back({row.format, count.footprint().total()});
    }
  }

  DeepSpeedForecast take() { return std::move(forecast_); }

 private:
  // Gradients are accumulated in a buffer per parameter. A rank whose partition has a part of a
  // parameter holds all of its buffer:
  //
  //   parameters     |    0    |    1    |    2    |      10 elements each
  //   partitions     |      rank 0   |    rank 1   |      15 elements each
  //   rank 0 holds the buffers of 0 and 1, rank 1 those of 1 and 2
  //
  // Counts the elements and the rounding of a rank: the mean of the node that holds most.
  void count_accumulated(int ranks_of_node) {
    struct Buffers {
      uint64_t elements = 0, rounding = 0;
    };
    std::vector<Buffers> of_node(1);
    uint64_t at = 0;
    const uint64_t part = std::max<uint64_t>(1, forecast_.params_of_rank);
    for (const int64_t signed_size : sizes_) {
      const auto size = static_cast<uint64_t>(signed_size);
      if (size == 0) continue;
      const uint64_t end = at + size;
      for (uint64_t rank = at / part; rank * part < end; ++rank) {
        const size_t node = static_cast<size_t>(rank) / static_cast<size_t>(ranks_of_node);
        if (node >= of_node.size()) of_node.resize(node + 1);
        of_node[node].elements += size;
        of_node[node].rounding += rounding_of(2 * size);
      }
      at = end;
    }
    const bool pins = config_.optimizer.pin_memory;
    const auto most = std::ranges::max_element(of_node, {}, [pins](const Buffers& node) {
      return 2 * node.elements + (pins ? node.rounding : 0);
    });
    const auto of_rank = [ranks_of_node](uint64_t sum) {
      return static_cast<uint64_t>(ceil_div(static_cast<int64_t>(sum), ranks_of_node));
    };
    accumulated_ = of_rank(most->elements);
    accumulated_rounding_ = of_rank(most->rounding);
  }

  uint64_t elements_of(const PerParam& buffer) const noexcept {
    return buffer.name == kAccumulated ? accumulated_ : forecast_.params_of_rank;
  }

  // The bytes that rounding adds to a buffer. Stages 1 and 2 make one request for the partition,
  // stage 3 one for each sub-group.
  uint64_t rounding_of_all(const PerParam& buffer) const {
    if (buffer.name == kAccumulated) return accumulated_rounding_;
    const uint64_t part = config_.stage < 3 ? forecast_.params_of_rank
                                            : static_cast<uint64_t>(config_.sub_group_size);
    const uint64_t whole_parts = part == 0 ? 0 : forecast_.params_of_rank / part;
    const uint64_t rest = forecast_.params_of_rank - whole_parts * part;
    return whole_parts * rounding_of(part * buffer.bytes) +
           (rest > 0 ? rounding_of(rest * buffer.bytes) : 0);
  }

  struct LineLabels {
    std::string_view name, owner, phase, purpose;  // of a line
    bool is_fixed = false;
  };
  void add(const LineLabels& labels, uint64_t bytes) {
    forecast_.lines.push_back({std::string(labels.name), labels.owner, labels.phase, labels.purpose,
                               labels.is_fixed, bytes});
  }

  const DeepSpeedConfig& config_;
  const std::span<const int64_t> sizes_;
  const int ranks_;
  const uint64_t baseline_bytes_;
  DeepSpeedForecast forecast_;
  uint64_t largest_ = 0;
  uint64_t accumulated_ = 0, accumulated_rounding_ = 0;  // see count_accumulated
};

}  // namespace

DeepSpeedConfig read_deepspeed(std::string_view text, int ranks) {
  DeepSpeedConfig config;
  try {
    read_json(text, [&](JsonValue& root) { config = ConfigReader().read(root, ranks); });
  } catch (const JsonError& error) {
    fail(Category::usage, fmt::format("DeepSpeed's configuration: {}", error.what()),
         {.offset = error.offset});
  }
  return config;
}

DeepSpeedForecast deepspeed_forecast(const DeepSpeedConfig& config, std::span<const int64_t> sizes,
                                     const DeepSpeedWorld& world) {
  Forecast forecast(config, sizes, world);
  if (config.optimizer.to_cpu) {  // else the optimizer holds no host memory
    forecast.own_lines();
    forecast.pinned_lines();
    if (world.workers > 0 && !world.protect) forecast.fork_lines(world.persistent_workers);
  }
  forecast.our_lines();
  return forecast.take();
}

}  // namespace modicum
