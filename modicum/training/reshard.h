// Copies a step (a saved checkpoint directory) with another division into files, or with its
// optimizer's state in another format, without holding all of it in memory. Part of the public
// header of `training`.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "modicum/training/convert.h"
#include "modicum/training/recorded_step.h"

namespace modicum {

class Restate;
struct StateFacts;

struct ReshardOptions {
  std::optional<uint64_t> shard_bytes;  // largest size of a file; empty: files as in the step
  std::optional<StateFormat> format;    // format of the optimizer's state; empty: as saved
  std::string staging;                  // see RunFlags::staging
};

// The files of a resharded step: every tensor under its own name. Not movable, as its members
// refer to each other.
class ReshardForm {
 public:
  // `weights`: the run of the step's model, in which every stored tensor is a target, unsharded.
  // If a format is given, throws MISMATCH if the step has no state; UNSUPPORTED if the state is of
  // another optimizer than AdamW, or if a parameter's master changes and the parameter is not
  // stored under its own name, dtype and shape. Also throws UNSUPPORTED if an adapter would be
  // divided into several files; and the errors of open_run.
  ReshardForm(const RecordedStep& step, const Run& weights, const ReshardOptions& options);
  ~ReshardForm();
  ReshardForm(const ReshardForm&) = delete;
  ReshardForm& operator=(const ReshardForm&) = delete;

  const ConvertedForm& weights() const noexcept { return *weights_; }
  const ConvertedForm* state() const noexcept { return state_ ? &*state_ : nullptr; }
  const Run& state_run() const noexcept { return *state_run_; }
  const Restate* restate() const noexcept { return restate_.get(); }
  // The text of state.json in the new format; empty if the format stays the same.
  std::optional<std::string> new_facts() const;
  // Host memory in addition to that of the loads. `plan` is the plan of run `weights`.
  Footprint footprint(const Plan& plan) const;

 private:
  void restate_in(const FoundStep& step, const Run& weights, const ReshardOptions& options);

  std::optional<Run> state_run_;  // the state's tensors, as stored
  std::unique_ptr<StateFacts> facts_;
  std::unique_ptr<Restate> restate_;
  std::optional<ConvertedForm> weights_, state_;
};

struct ReshardTask {
  LoadTask load;  // load of the weights: one rank, every target unsharded, Destination::copy
  const RecordedStep& step;
  const ReshardForm& form;
  std::string out;
  bool adopts = false;  // see ConversionJournal::Inputs
};
// Writes the step to `out`, file by file, in a rank process. `out` exists only once it is a
// complete and durable step. After a kill, a later call with the same inputs continues after the
// finished files. Throws INTEGRITY, naming the tensor, if a value is not the saved one; and the
// errors of convert_in_rank.
ConvertReport reshard_in_rank(const ReshardTask& task, ShowBytes show);

}  // namespace modicum
