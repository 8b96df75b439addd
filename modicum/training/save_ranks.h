// Trains, saves and resumes in rank processes of this machine. Part of the public header of
// `training`.
#pragma once

#include <optional>
#include <string>

#include "modicum/training/checkpoint_save.h"
#include "modicum/training/load_ranks.h"
#include "modicum/training/state_load.h"

namespace modicum {

// The optimizer's state of a checkpoint, which must have one. The constructor throws the errors of
// open_checkpoint; INTEGRITY.
struct ResumeState {
  ResumeState(FileSystem& opened, const RunCheckpoint& resumed);

  const Checkpoint checkpoint;  // in the checkpoint's kStateDirectory
  const StateFiles files;       // the files of that checkpoint
  const StateFacts facts;
  const CarriedFiles carried;  // for a save that goes on from this checkpoint

  StateSource source() const noexcept { return {checkpoint, files, facts}; }
  // What reading it adds to the promise of `run`; see resume_footprint_of. Throws MISMATCH if it is
  // not the state of the run (StateFiles::require_of).
  Footprint footprint(const Run& run) const;
};
struct SaveTask {
  LoadTask load;  // its plan must have phase `save`
  const SavePlan& plan;
  std::string root;            // the directory of the saved checkpoints
  int64_t step = 0;            // number of the step to save
  std::optional<size_t> keep;  // number of newest intact checkpoints to keep; empty: all
  // With an optimizer: the files of its state, and the number of training steps before the save.
  const StateFiles* state = nullptr;
  // The state that the checkpoint has, to go on from, in any format; it must fit the run
  // (StateFiles::require_of). Null: the state begins with zero moments.
  const ResumeState* from = nullptr;
  int steps = 0;
  uint64_t seed = 0;  // for gradients and for the random bits of stochastic rounding
  // After SIGTERM the save goes on for at most this time, and only if SaveGrace expects it to
  // finish in this time.
  int64_t grace_ns = 0;
};
// What a save of the model of `run` needs. Holds the plan of the save meanwhile.
SaveNeeds save_needs_of(const Run& run, const SaveForm& form);
// The memory that a save adds to a promise (PlanOptions::save). `model`: what the model needs.
// `state` is null without an optimizer.
Footprint save_footprint_of(const SaveNeeds& model, const StateFiles* state);
// Loads, trains and saves. On failure no new checkpoint is visible, unless publish_checkpoint fails
// after its rename. Throws the errors of run_ranks and CheckpointSave; PREEMPTED after SIGTERM,
// unless the save may finish (SaveTask::grace_ns) or is already being published.
SaveReport save_in_ranks(const SaveTask& task, ShowBytes show);

struct ResumeTask {
  LoadTask load;  // of a checkpoint; its plan must have phase `resume` if there is a state
  // Must fit the run (StateFiles::require_of); null: no state is read.
  const ResumeState* state = nullptr;
  int steps = 0;  // number of training steps after the load
  std::optional<double> max_norm;
};
// Loads, reads the state, and makes `steps` training steps with the gradients that an uninterrupted
// run would have. Throws the errors of load_in_ranks.
LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show);
struct RehearsalTask {
  LoadTask load;  // its run must have an optimizer
  int steps = 1;
  uint64_t seed = 0;  // as in SaveTask
  std::optional<double> max_norm;
  // If given, must have the same load, steps and seed. The ranks then save after the steps, and
  // make one more step, so that the caller can compare its state with that of a resumed run.
  const SaveTask* save = nullptr;
};
// Throws the errors of save_in_ranks.
RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show);

}  // namespace modicum
