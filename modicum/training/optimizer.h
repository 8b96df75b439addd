// The optimizer of a rank over what it has loaded.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "modicum/report/report.h"
#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/gradients.h"

namespace modicum {

// What a load has brought, into a rank's outcome.
void note(RankOutcome& outcome, const LoadOutcome& loaded) noexcept;

// A state for each format that there is: fp32 for what was loaded as fp32, else the run's. From the
// beginning it holds all that steps need, which is the plan's phase `step` to the byte; one thread.
class Training {
 public:
  // `loaded` has the rank's shards and outlives this; they become the masters, or get each new
  // parameter. Charges and commits everything. BUDGET, NOMEM.
  Training(const Run& run, const Plan& plan, int rank, HostSink& loaded, Ledger& ledger,
           int threads, uint64_t seed = 0);

  // The masters are what was loaded. `alive` is called by several threads, here and below.
  void begin(const std::function<void()>& alive);
  // The gradients of a step arrive, each in the dtype of its parameter. Returns this rank's part of
  // the norm.
  GradNorm deliver(int64_t step, const std::function<void()>& alive);
  void step(const StepOptions& options);
  StateDigest digest() const;  // this rank's part

 private:
  struct State {
    AdamWSpec spec;                            // until `adamw` has it
    std::vector<DType> dtypes;                 // of each shard, as loaded
    std::vector<const std::byte*> apart_from;  // loaded elements that are not the master, or null
    std::unique_ptr<AdamW> adamw;
  };
  std::vector<State> states_of(const Run& run, const Plan& plan, int rank, HostSink& loaded,
                               Ledger& ledger);

  Charge header_, plan_, ring_, tables_;
  const Buffer staging_;
  const MadeGradients gradients_;
  std::vector<State> states_;
};

}  // namespace modicum
