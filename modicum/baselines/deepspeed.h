// A forecast of the host memory that DeepSpeed holds for a model, allocation by allocation, from
// its configuration (docs/guide/deepspeed.md). Functions may be called on any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "modicum/report/report.h"

namespace modicum {

constexpr std::string_view kDeepSpeedVersion = "0.19.8";

constexpr int kMaxWorkers = 1024;

struct DeepSpeedFlags {
  std::string config;  // path of a ds_config.json; empty: no forecast
  int workers = 0;     // forked data-loader workers per rank, at most kMaxWorkers
  bool persistent_workers = false;
};

// The settings that determine host memory.
struct DeepSpeedConfig {
  struct Offload {
    bool to_cpu = false;
    bool pin_memory = true;
  };
  int stage = 0;
  Offload optimizer;
  Offload param;
  int64_t accumulation_steps = 1;
  int64_t sub_group_size = 1000000000;  // elements; stage 3 divides a rank's state into such groups
};
// Reads a ds_config.json. Throws USAGE if it is not JSON, a number is out of range, or its batch
// sizes disagree. Throws UNSUPPORTED, which names the key, for a setting with an unknown effect on
// memory, for "auto" where the forecast needs a value, and without bf16 or fp16.
DeepSpeedConfig read_deepspeed(std::string_view text, int ranks);

struct DeepSpeedWorld {
  int ranks = 1;
  int ranks_of_node = 1;  // ranks on the largest node
  int workers = 0;        // per rank, forked after DeepSpeed's initialisation
  bool persistent_workers = false;
};
// Forecasts the memory of a rank; no lines without offload_optimizer to the CPU. `sizes`: the
// number of elements of each parameter. Assumes training in bf16 or fp16.
DeepSpeedForecast deepspeed_forecast(const DeepSpeedConfig& config, std::span<const int64_t> sizes,
                                     const DeepSpeedWorld& world);

}  // namespace modicum
