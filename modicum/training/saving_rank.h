// One rank's part of a save, and the leader's part after all ranks have saved. Internal to
// `training`.
#pragma once

#include <cstdint>
#include <functional>

#include "modicum/training/optimizer.h"
#include "modicum/training/rank_load.h"
#include "modicum/training/save_parts.h"
#include "modicum/training/save_ranks.h"

namespace modicum {

// The directory that the ranks of a save write into. Construct it before the fork.
struct SavePlace {
  SavePlace(const CheckpointSave& save, const SavePlan& plan)
      : to{save.directory(), save.point()}, gathers(plan.plan()) {}

  const PartialCheckpoint to;
  Gathers gathers;  // the launcher keeps their pages as long as it runs
};

// As require_recordable of a SavePlan.
void require_recordable(const SaveTask& task);
// Saves the buffers of rank `at.rank` and, if `task.state` is set, the optimizer's state. All ranks
// call it at the same time. Throws the errors of save; INTEGRITY if a copied value of a checkpoint
// is not the saved one.
SaveOutcome save_rank(const SaveTask& task, const SavePlace& place, const RankContext& at,
                      RankLoad& loaded, const RankOptimizer* optimizer);

// The optimizer's part of a save, over all ranks.
struct TrainedSteps {
  int skipped = 0;      // number of training steps that were skipped
  uint64_t digest = 0;  // digest of the saved state
};
// Publishes what all ranks have saved. `waits`: see PublishOptions.
SavedCheckpoint publish(CheckpointSave& save, const SaveTask& task, const TrainedSteps& trained,
                        std::function<void()> waits);

}  // namespace modicum
