// The optimizer of a rank: every AdamW that its parameters need, fed with made-up gradients. Part
// of the door of `training`.
#pragma once

#include <memory>
#include <vector>

#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/gradients.h"

namespace modicum {

// What one AdamW steps; lists by shard.
struct Trained {
  AdamWSpec spec;
  std::vector<DType> grad_dtypes;  // as gradients arrive
  // Loaded elements from which the master is cast before the first step; null where it is not.
  std::vector<const std::byte*> cast_from;
};

// What `rank` has loaded and trains, in the run's format and in fp32, as state_format_of says. The
// loaded memory becomes the masters, or gets each new parameter.
std::vector<Trained> trained_of(const Run& run, const Plan& plan, int rank, HostSink& loaded);

// Holds from the beginning all that steps need: with the gradients' staging, training_footprint to
// the byte. One thread.
class RankOptimizer {
 public:
  // `threads` construct, step and digest. The memory that `trained` refers to and `gradients` must
  // outlive this. BUDGET, NOMEM.
  RankOptimizer(std::vector<Trained> trained, const MadeGradients& gradients, Ledger& ledger,
                int threads);

  // The masters are what was loaded; or made up.
  void cast_masters(Heartbeat heartbeat);
  void make_masters();
  // All gradients of a step arrive. Returns this rank's part of the norm.
  GradNorm deliver(int64_t step, float loss_scale, Heartbeat heartbeat);
  void step(const StepOptions& options);
  void skip();
  StateDigest digest() const;  // this rank's part

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
