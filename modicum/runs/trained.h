// The trained parameters of a load, and their optimizer state. These are values, which any thread
// may use.
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

// Parses "none" (no optimizer) or "adamw:FORMAT". Throws USAGE for any other text.
std::optional<StateFormat> optimizer_flag(const std::string& flag);

// A rank's staging for synthetic gradients and for casting masters. Its pages are committed.
constexpr uint64_t kGradientStagingBytes = 1 * kMiB;
// Of AdamW in Python for parameters on a device: slots of kRingSlotBytes (SLOTS in
// modicum/python/modicum/torch/optim/lanes.py).
constexpr uint64_t kDeviceSlotsPerThread = 4;

// A rank's shard of a parameter. Parameters are the castable targets (fp32, bf16, fp16) that are
// neither buffers nor frozen; an alias is trained as its target.
struct TrainedShard {
  ShardSpec shard;  // its pointers are not set
  StateFormat format = StateFormat::fp32;
  uint32_t target = 0;  // index in the recipe
  uint32_t buffer = 0;  // local buffer with the shard's elements, contiguous from element `at`
  int64_t at = 0;
  DType dtype = DType::f32;  // as loaded

  // Whether the loaded elements serve as the master weights, or as their upper half. Otherwise the
  // master has separate memory, and each step writes the new parameter to the loaded elements.
  bool is_master() const noexcept { return dtype == row_of(format).master; }
};
// The parameters that are not trained: they have no optimizer state, and may have any dtype. If the
// name of an alias is among them, its target is frozen.
class FrozenSet {
 public:
  // `expression`: the value of --frozen, "" for none; throws USAGE if it is invalid. `names`: FQNs
  // of more frozen parameters.
  FrozenSet(const std::string& expression, std::span<const std::string> names);
  // Gives the frozen parameters Role::buffer in the recipe. Throws USAGE if the expression matches
  // none.
  void mark(Recipe& recipe) const;

 private:
  std::string expression_;
  std::optional<NamePattern> pattern_;
  std::set<std::string, std::less<>> names_;
};

// Calls `fn` with each shard of a trained parameter on `rank`. Throws UNSUPPORTED, naming the
// target, for parameters that can't be trained (complex, and floating dtypes other than fp32, bf16
// and fp16), and for a shard of more than 2^22 separate runs.
void for_each_trained(const Recipe& recipe, const Layout& layout, StateFormat format, int rank,
                      FunctionRef<void(TrainedShard&& shard)> fn);

// The trained parameters of the model, as indices of targets, ascending. Throws UNSUPPORTED for one
// that can't be trained.
std::vector<uint32_t> trained_targets(const Recipe& recipe);
// The numel of each of these targets.
std::vector<int64_t> trained_sizes(const Recipe& recipe);

// The memory that training adds to a rank's shards: optimizer states, their tables (purpose `plan`)
// and the staging of gradients. A step allocates nothing more.
Footprint training_footprint(std::span<const AdamWCount> states);
// The memory of AdamW's state if the parameters are on a device: the states hold all masters, and
// each state has staging for `threads`.
Footprint device_training_footprint(std::span<const AdamWCount> states, int threads);
// training_footprint of each rank, as phase `step` of a plan. `device_threads`: set if the
// parameters are on devices; then device_training_footprint with this number of threads.
Phase step_phase(const Recipe& recipe, const Layout& layout, StateFormat format,
                 std::optional<int> device_threads = std::nullopt);

}  // namespace modicum
