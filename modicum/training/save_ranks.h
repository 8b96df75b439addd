// Training, saving and resuming in rank processes of this machine. Part of the door of
// `training`.
#pragma once

#include <optional>
#include <string>

#include "modicum/training/load_ranks.h"
#include "modicum/training/step_save.h"

namespace modicum {

struct SaveTask {
  LoadTask load;  // of a plan with phase `save`
  const SavePlan& plan;
  std::string root;
  int64_t step = 0;
  std::optional<size_t> keep;  // intact steps; empty: all are kept
  // With an optimizer: the files of its state, and the number of steps before the save.
  const StateFiles* state = nullptr;
  int steps = 0;
  uint64_t seed = 0;  // of gradients and random bits
  // After SIGTERM the save goes on for at most this long, if it can finish in that time.
  int64_t grace_ns = 0;
};
// The memory that saving the buffers of `run` adds to a promise (PlanOptions::save). `state` is
// null without an optimizer.
Footprint save_footprint_of(const Run& run, const SaveForm& form, const StateFiles* state);
// Errors as those of run_ranks and StepSave. On failure no step is visible. PREEMPTED after
// SIGTERM, unless the save may finish (SaveTask::grace_ns) or is being published.
SaveReport save_in_ranks(const SaveTask& task, ShowBytes show);

// The optimizer's state of a step. The step must have one. Errors as those of open_checkpoint;
// INTEGRITY.
struct ResumeState {
  ResumeState(FileSystem& opened, const FoundStep& step);

  const Checkpoint checkpoint;  // in the step's kStateDirectory
  const StateFiles files;       // the files of that checkpoint
  const StateFacts facts;
};
struct ResumeTask {
  LoadTask load;          // of a plan with phase `resume`, if there is a state
  const FoundStep& step;  // the step to load
  // Must fit the run (StateFiles::require_of); null: no state is read.
  const ResumeState* state = nullptr;
  int steps = 0;
  std::optional<double> max_norm;
};
// Loads, reads the state, and makes `steps` more steps, with the gradients of an uninterrupted run.
// Errors as those of load_in_ranks; INTEGRITY, naming the file and the tensor, if a value differs
// from the saved one. Stored tensors that are loaded in part, more than once, or in another dtype
// are not compared, and a warning is given.
LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show);
// The memory that reading the state from these files adds to a promise (PlanOptions::resume).
Footprint resume_footprint_of(const StateFiles& state);

struct RehearsalTask {
  LoadTask load;  // of a run with an optimizer
  int steps = 1;
  uint64_t seed = 0;  // of gradients and random bits
  std::optional<double> max_norm;
  // If given, must have the same load, steps and seed. The ranks then save after the steps, and
  // make one more step, whose state a resumed run must equal.
  const SaveTask* save = nullptr;
};
// Errors as those of save_in_ranks.
RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show);

}  // namespace modicum
