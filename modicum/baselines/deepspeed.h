// A forecast of the host memory that DeepSpeed holds for a model, allocation by allocation, from
// its configuration (docs/internals/memory.md). Values; any thread.
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
  std::string config;  // a file; empty: no forecast
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
  int64_t sub_group_size = 1000000000;  // elements; stage 3 divides its states into such groups
};
// Reads a ds_config.json. USAGE if it is not JSON or its batch sizes disagree; UNSUPPORTED, naming
// the key, for settings whose effect on memory is unknown and for "auto" where the forecast needs a
// value.
DeepSpeedConfig read_deepspeed(std::string_view text, int ranks);

struct DeepSpeedWorld {
  int ranks = 1;
  int ranks_of_node = 1;
  int workers = 0;  // forked after DeepSpeed's initialisation; 0: none
  bool persistent_workers = false;
};
// `sizes`: elements of each parameter. Assumes training in bf16 or fp16.
DeepSpeedForecast deepspeed_forecast(const DeepSpeedConfig& config, std::span<const int64_t> sizes,
                                     const DeepSpeedWorld& world);

}  // namespace modicum
