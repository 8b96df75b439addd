// One rank's part of a save, and the leader's part after all ranks have saved. Internal to
// `training`.
#pragma once

#include <cstdint>
#include <string>

#include "modicum/training/optimizer.h"
#include "modicum/training/save_ranks.h"

namespace modicum {

// The directory that the ranks of a save write into. Construct before the fork.
struct SavePlace {
  SavePlace(const StepSave& step, const SavePlan& plan)
      : point(step.point()),
        directory(step.directory()),
        state_directory(step.state_directory()),
        gathers(plan.plan()) {}

  const uint64_t point;
  const std::string directory, state_directory;
  Gathers gathers;  // whose pages stay until the launcher ends
};

// Saves the buffers of rank `at.rank` and, if `task.state` is set, the optimizer's state. All ranks
// call it at the same time. Errors as those of save.
SaveOutcome save_rank(const SaveTask& task, const SavePlace& place, const RankContext& at,
                      HostSink& shards, const RankOptimizer* optimizer);

// The optimizer's part of a save, over all ranks.
struct TrainedSteps {
  int skipped = 0;      // of the steps that the task made
  uint64_t digest = 0;  // of the state that was saved
};
// Publishes what all ranks have saved.
SavedStep publish(StepSave& step, const SaveTask& task, const TrainedSteps& trained);

}  // namespace modicum
