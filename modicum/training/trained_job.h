// The one life of ranks that train, save and resume: `save`, `resume` and `rehearse` are jobs of
// it, with a report each. Internal to `training`.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "modicum/training/save_ranks.h"

namespace modicum {

// What each rank does, in this order: load; take over a state, or cast masters; make steps; save;
// make more steps.
struct TrainedJob {
  const LoadTask& load;
  bool trains = false;                // the run has an optimizer, which is allocated
  const ResumeState* from = nullptr;  // its state is read; null: masters are cast from the model
  uint64_t seed = 0;                  // see SaveTask
  std::optional<double> max_norm;
  int steps = 0;
  const SaveTask* save = nullptr;  // null: nothing is saved
  int steps_after = 0;
};

// The parts of a life whose peaks are measured: the load, and the read of a state; the first step;
// all later steps, or none; the save.
enum LifePart : uint8_t { kLoadPart, kFirstStepPart, kStepsPart, kSavePart, kLifeParts };

// The outcome of a rank. Plain data, since it is sent from the rank's process.
struct RankLife {
  std::array<RankOutcome, kLifeParts> parts;  // a part that did not run has no peak
  SaveOutcome save;
  int64_t save_begin_ns = 0, save_end_ns = 0;
  int32_t skipped = 0;  // steps before the save whose gradients were not finite
  GradNorm norm;        // of the last step
  // This rank's parts of the digests: of the model and the state at the end, and of the state that
  // was saved.
  uint64_t model_digest = 0, state_digest = 0, saved_digest = 0;

  // The outcome of the first of `life_parts`, with the highest peaks of all of them.
  RankOutcome highest(std::initializer_list<LifePart> life_parts) const;
};

struct JobOutcome {
  std::vector<RankLife> ranks;
  ComparedValues compared;
  double load_s = 0;   // until the last rank has loaded
  double ranks_s = 0;  // until the last rank has ended
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes;
  // With a save: the published checkpoint, with the warnings, and the damaged checkpoint of its
  // number.
  std::optional<SavedCheckpoint> saved;
  std::optional<DamagedCheckpoint> damaged;
  bool is_preempted = false;
};

// Lives the job in the world of its load, and publishes the saved checkpoint. On failure no new
// checkpoint is visible, unless publish_checkpoint fails after its rename. Throws the errors of
// run_ranks and CheckpointSave; INTEGRITY if a value of a checkpoint is not the saved one;
// PREEMPTED as save_in_ranks.
JobOutcome run_job(const TrainedJob& job, ShowBytes show);

}  // namespace modicum
