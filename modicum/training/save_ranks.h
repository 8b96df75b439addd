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
  // With an optimizer: the files of its state, and the steps that it makes before the save.
  const StateFiles* state = nullptr;
  int steps = 0;
  uint64_t seed = 0;  // of gradients and random bits
};
// The part of a promise that saving adds (PlanOptions::save), for the buffers of `run`. `state`:
// null without an optimizer.
Footprint save_footprint_of(const Run& run, const SaveForm& form, const StateFiles* state);
// Errors as run_ranks', and those of StepSave. On failure no step is visible.
SaveReport save_in_ranks(const SaveTask& task, ShowBytes show);

// The optimizer's state of a step, which must hold one. Errors as open_checkpoint's; INTEGRITY.
struct ResumeState {
  ResumeState(FileSystem& opened, const FoundStep& step);

  const Checkpoint checkpoint;  // in the step's kStateDirectory
  const StateFiles files;       // of that checkpoint
  const StateFacts facts;
};
struct ResumeTask {
  LoadTask load;                       // of a plan with phase `resume`, if there is a state
  const ResumeState* state = nullptr;  // of the run (StateFiles::require_of); null: none is read
  int steps = 0;
  std::optional<double> max_norm;
};
// Loads, reads the state, and makes `steps` more steps with the gradients that an uninterrupted run
// would have. Errors as load_in_ranks'.
LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show);

struct RehearsalTask {
  LoadTask load;  // of a run with an optimizer
  int steps = 1;
  uint64_t seed = 0;  // of gradients and random bits
  std::optional<double> max_norm;
  // If given, of the same load, steps and seed: saves after the steps, and then makes another one,
  // with which a resumed run can be compared.
  const SaveTask* save = nullptr;
};
// Errors as save_in_ranks'.
RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show);

}  // namespace modicum
