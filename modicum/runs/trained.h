// The trained parameters of a load, and their optimizer state. Values; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "modicum/layout/layout.h"
#include "modicum/optim/optim.h"
#include "modicum/recipe/recipe.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Parses "none" (no optimizer) or "adamw:FORMAT"; else USAGE, with the nearest name.
std::optional<StateFormat> optimizer_flag(const std::string& flag);

// A rank's committed staging for synthetic gradients and for casting masters.
constexpr uint64_t kGradientStagingBytes = 1 * kMiB;

// A rank's shard of a parameter. Parameters are the castable targets (fp32, bf16, fp16) that are
// neither buffers nor frozen; an alias is trained as its target.
struct TrainedShard {
  ShardSpec shard;  // without its memory
  StateFormat format = StateFormat::fp32;
  uint32_t target = 0;
  uint32_t buffer = 0;  // holds its elements contiguously from local element `at` on
  int64_t at = 0;
  DType dtype = DType::f32;  // as loaded

  // Whether the loaded elements serve as the master, or as its upper half. Otherwise the master has
  // its own memory, and each step writes the new parameter to the loaded elements.
  bool is_master() const noexcept { return dtype == row_of(format).master; }
};
// The parameters that are not trained: they have no state, and may have any dtype. An alias that
// matches freezes its target.
class Frozen {
 public:
  // `expression` is the value of --frozen, "" for none; USAGE if it is invalid. `names`: FQNs of
  // more frozen parameters.
  Frozen(const std::string& expression, std::span<const std::string> names);
  // Marks the frozen parameters as buffers in the recipe. USAGE if the expression matches none.
  void mark(Recipe& recipe) const;

 private:
  std::string expression_;
  std::optional<NamePattern> pattern_;
  std::set<std::string, std::less<>> names_;
};

// UNSUPPORTED, naming the target, for floating-point targets that can't be trained (FP8 codes,
// fp64).
void for_each_trained(const Recipe& recipe, const Layout& layout, StateFormat format, int rank,
                      FunctionRef<void(TrainedShard&& shard)> fn);

// The numel of each parameter of the model; errors as for_each_trained.
std::vector<int64_t> trained_sizes(const Recipe& recipe);

// The memory that training adds to a rank's shards: optimizer states, their tables (purpose `plan`)
// and the staging of gradients. A step allocates nothing more.
Footprint training_footprint(std::span<const AdamWCount> states);
// The same for each rank of a load, as phase `step` of a plan.
Phase step_phase(const Recipe& recipe, const Layout& layout, StateFormat format);

}  // namespace modicum
