// The trained parameters of a load and the optimizer's state for them. Values; any thread.
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

// Staging of a rank for synthetic gradients and for masters as they are cast; committed.
constexpr uint64_t kGradientStagingBytes = 1 * kMiB;

// A rank's shard of a parameter. Parameters are the castable targets (fp32, bf16, fp16) other than
// buffers and frozen ones; an alias is trained as the target that it names.
struct TrainedShard {
  ShardSpec shard;  // without its memory
  StateFormat format = StateFormat::fp32;
  uint32_t target = 0;
  uint32_t buffer = 0;  // holds its elements contiguously from local element `at` on
  int64_t at = 0;
  DType dtype = DType::f32;  // as loaded

  // Whether the loaded elements are the master, or its upper half. Otherwise the master has its own
  // memory, and each step writes the new parameter to the loaded elements.
  bool is_master() const noexcept { return dtype == row_of(format).master; }
};
// The parameters that do not train: no state is held for them, and they may have any dtype. A match
// of an alias freezes the target that it names.
class Frozen {
 public:
  // `expression`: --frozen, none if empty; USAGE if it is invalid. `names`: FQNs of further ones.
  Frozen(const std::string& expression, std::span<const std::string> names);
  // Makes them buffers of the recipe. USAGE if the expression matches no parameter.
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
