// What of a load is trained, and how the optimizer's state lies over it. Values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/layout/layout.h"
#include "modicum/optim/optim.h"
#include "modicum/recipe/recipe.h"
#include "modicum/spec/spec.h"

namespace modicum {

// "none" (nothing) or "adamw:FORMAT"; else USAGE, with the nearest name.
std::optional<StateFormat> optimizer_flag(const std::string& flag);

// Made-up gradients, and masters that are cast, go through so many bytes of a rank, which are
// committed whole.
constexpr uint64_t kGradientStagingBytes = 1 * kMiB;

// The part of a parameter that a rank trains. Parameters are the castable targets (fp32, bf16,
// fp16) that are no buffers; an alias is trained under the name of what it is an alias of.
struct TrainedShard {
  ShardSpec shard;  // whose memory is not set
  StateFormat format = StateFormat::fp32;
  uint32_t target = 0;
  uint32_t buffer = 0;  // where its elements lie one after another, from local element `at` on
  int64_t at = 0;
  DType dtype = DType::f32;  // as loaded

  // Whether the loaded elements are the master itself, or its upper half. Otherwise the master is
  // memory of its own, and each step writes the new parameter to the loaded elements.
  bool is_master() const noexcept { return dtype == row_of(format).master; }
};
// UNSUPPORTED, naming it, for a floating-point target that can't be trained (FP8 codes, fp64).
void for_each_trained(const Recipe& recipe, const Layout& layout, StateFormat format, int rank,
                      FunctionRef<void(TrainedShard&& shard)> fn);

// Elements of each parameter of the model; errors as for_each_trained.
std::vector<int64_t> trained_sizes(const Recipe& recipe);

// What training adds on a rank to the shards: the optimizer's states, their tables (purpose `plan`)
// and the staging of gradients. A step takes nothing more.
Footprint training_footprint(std::span<const AdamWCount> states);
// The same for each rank of a load: the phase `step` of a plan.
Phase step_phase(const Recipe& recipe, const Layout& layout, StateFormat format);

}  // namespace modicum
