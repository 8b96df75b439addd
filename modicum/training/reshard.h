// Writes a step with its tensors in other files, or its optimizer's state in another format,
// without holding either. Part of the door of `training`.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "modicum/training/convert.h"

namespace modicum {

class Restate;
struct StateFacts;

struct ReshardOptions {
  std::optional<uint64_t> shard_bytes;  // of a file; empty: files as in the step
  std::optional<StateFormat> format;    // of the optimizer's state; empty: as saved
  std::string staging;                  // as RunFlags::staging
};

// The files of a resharded step: every tensor under its own name. Not movable, as its members
// borrow from each other.
class ReshardForm {
 public:
  // `weights`: the step's model, every stored tensor as a target, unsharded. MISMATCH if a format
  // is given and the step has no state; UNSUPPORTED for the state of another optimizer
  // than AdamW, and for a parameter that is not stored under its own name if its
  // master changes; errors as those of open_run.
  ReshardForm(const FoundStep& step, const Run& weights, const ReshardOptions& options);
  ~ReshardForm();
  ReshardForm(const ReshardForm&) = delete;
  ReshardForm& operator=(const ReshardForm&) = delete;

  const ConvertedForm& weights() const noexcept { return *weights_; }
  const ConvertedForm* state() const noexcept { return state_ ? &*state_ : nullptr; }
  const Run& state_run() const noexcept { return *state_run_; }
  const Restate* restate() const noexcept { return restate_.get(); }
  // state.json of the new format, if it is another one.
  std::optional<std::string> new_facts() const;
  // Host memory besides that of the loads. `plan`: of `weights`.
  Footprint footprint(const Plan& plan) const;

 private:
  void restate_in(const FoundStep& step, const Run& weights, const ReshardOptions& options);

  std::optional<Run> state_run_;  // the state's tensors, as stored
  std::unique_ptr<StateFacts> facts_;
  std::unique_ptr<Restate> restate_;
  std::optional<ConvertedForm> weights_, state_;
};

struct ReshardTask {
  LoadTask load;  // of the weights: one rank that holds every target unsharded, Destination::copy
  const FoundStep& step;
  const ReshardForm& form;
  std::string out;
};
// Writes the step to `out`, file by file, in a rank process. `out` is visible once it is a complete
// and durable step; a later call with the same inputs keeps the files that a killed one has
// finished. INTEGRITY, naming the tensor, if a value is not the saved one. Errors otherwise as
// those of convert_in_rank.
ConvertReport reshard_in_rank(const ReshardTask& task, ShowBytes show);

}  // namespace modicum
