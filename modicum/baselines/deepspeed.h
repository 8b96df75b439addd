// A forecast of the host memory that DeepSpeed holds for a model, allocation by allocation, from
// its configuration (docs/guide/deepspeed.md). Functions may be called on any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/report/report.h"

namespace modicum {

// The version whose memory was measured and is forecast.
constexpr std::string_view kDeepSpeedVersion = "0.19.8";

constexpr int kMaxWorkers = 1024;

struct DeepSpeedFlags {
  std::string config;  // path of a ds_config.json; empty: no forecast
  int workers = 0;     // forked data-loader workers per rank, at most kMaxWorkers
  bool persistent_workers = false;
  bool protect = false;  // the program calls modicum.torch.protect
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
// Reads the text of a ds_config.json. Throws USAGE if it is not JSON, a value has the wrong type or
// is out of range, or the batch sizes disagree. Throws UNSUPPORTED for a setting with an unknown
// effect on memory, and one error for all values that the forecast needs and the text lacks or
// leaves as "auto" (bf16 or fp16 must be enabled).
DeepSpeedConfig read_deepspeed(std::string_view text, int ranks);

struct DeepSpeedWorld {
  int ranks = 1;
  int ranks_of_node = 1;  // ranks on the largest node
  int workers = 0;        // per rank, forked after DeepSpeed's initialisation
  bool persistent_workers = false;
  bool protect = false;         // forked workers inherit none of DeepSpeed's buffers
  uint64_t baseline_bytes = 0;  // of a rank's process before DeepSpeed, if it is to be counted
};
// Forecasts the host memory of a rank that trains in bf16 or fp16. `sizes` has the number of
// elements of each parameter. The forecast has no lines unless offload_optimizer is to the CPU.
DeepSpeedForecast deepspeed_forecast(const DeepSpeedConfig& config, std::span<const int64_t> sizes,
                                     const DeepSpeedWorld& world);

// The JSON merge patch that makes the configuration `from` that of `to`, which may have another
// stage, pin less memory, and offload less; empty if they are equal.
std::string deepspeed_patch(const DeepSpeedConfig& from, const DeepSpeedConfig& to);

// What a forecast is computed from.
struct DeepSpeedTask {
  DeepSpeedConfig config;
  std::vector<int64_t> sizes;  // of the parameters, in elements
  DeepSpeedWorld world;

  DeepSpeedForecast forecast() const { return deepspeed_forecast(config, sizes, world); }
};

}  // namespace modicum
