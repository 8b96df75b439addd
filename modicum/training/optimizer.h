// The optimizer of a rank: an AdamW per state format, with synthetic gradients. Part of the public
// header of `training`.
#pragma once

#include <memory>
#include <vector>

#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/gradients.h"

namespace modicum {

// The parameters of one AdamW. The lists have one element per shard.
struct TrainedGroup {
  AdamWSpec spec;
  std::vector<DType> grad_dtypes;  // in which gradients arrive
  // The loaded elements from which a separate master is cast before the first step; null if the
  // loaded elements are the master.
  std::vector<const std::byte*> cast_from;
};

// The parameters that `rank` has loaded, one TrainedGroup for each state format that they have
// (state_format_of). The loaded memory becomes the master, or receives the low-precision parameter
// after each step.
std::vector<TrainedGroup> trained_of(const Run& run, const Plan& plan, int rank, HostSink& loaded);

// Allocates all memory of the steps at construction. With the gradients' staging this is exactly
// training_footprint. Not thread-safe.
class RankOptimizer {
 public:
  // Steps use `threads` threads. `gradients` and the memory to which `trained` points must outlive
  // this. Throws BUDGET or NOMEM.
  RankOptimizer(std::vector<TrainedGroup> trained, const MadeGradients& gradients, Ledger& ledger,
                int threads);

  // Initialise the masters: cast_masters from the loaded elements, make_masters from a hash
  // (MadeGradients::make_masters).
  void cast_masters(Heartbeat heartbeat);
  void make_masters();
  // Delivers all gradients of a step. Returns this rank's part of the norm.
  GradNorm deliver(int64_t step, float loss_scale, Heartbeat heartbeat);
  void step(const StepOptions& options);
  void skip();
  StateDigest digest() const;  // this rank's part
  void for_each_state(FunctionRef<void(AdamW&)> fn) const;

 private:
  struct State {
    std::unique_ptr<AdamW> adamw;
    std::vector<DType> grad_dtypes;
    std::vector<const std::byte*> cast_from;
  };

  const MadeGradients& gradients_;
  Charge tables_;
  std::vector<State> states_;
};

}  // namespace modicum
