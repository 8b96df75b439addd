#include "modicum/training/saving_rank.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace modicum {
namespace {

// The names of the tensors that the run does not train.
std::vector<std::string> without_state(const Run& run) {
  std::set<std::string> trained;
  for (int rank = 0; rank < run.layout.world_size(); ++rank) {
    for_each_trained(run.recipe, run.layout, *run.optimizer, rank,
                     [&](TrainedShard&& shard) { trained.insert(shard.shard.fqn); });
  }
  std::vector<std::string> names;
  for (uint32_t t = 0; t < run.recipe.targets.size(); ++t) {
    const TensorSpec& spec = run.recipe.targets[t].spec;
    if (!run.recipe.is_alias(t) && !trained.contains(spec.fqn)) names.push_back(spec.fqn);
  }
  return names;
}

StateFacts facts_of(const SaveTask& task, const TrainedSteps& trained) {
  StateFacts facts;
  if (task.from != nullptr) facts = task.from->facts;
  const int steps_made = task.steps - trained.skipped;
  facts.steps += steps_made;
  for (auto& [fqn, steps] : facts.steps_of) steps += steps_made;
  facts.format = *task.load.run.optimizer;
  facts.seed = task.seed;
  facts.without_state = without_state(task.load.run);
  facts.digest = trained.digest;
  return facts;
}

}  // namespace

void require_recordable(const SaveTask& task) {
  std::vector<std::string> others;
  if (task.from != nullptr) {
    for (const CheckpointFile& file : task.from->carried.files) others.push_back(file.name);
  }
  require_recordable(task.plan, task.state != nullptr ? &task.state->manifest() : nullptr, others);
}

SaveOutcome save_rank(const SaveTask& task, const SavePlace& place, const RankContext& at,
                      RankLoad& loaded, const RankOptimizer* optimizer) {
  if (at.gather != nullptr) at.gather->commit(*at.ledger);
  SaveParts parts{
      {task.load.run.checkpoint, task.plan, loaded.shards(), task.load.threads, &loaded.compared()},
      {}};
  MODICUM_ASSERT(task.state == nullptr || optimizer != nullptr);
  const auto shards = [optimizer](FunctionRef<void(const HeldShard&)> visit) {
    for_each_held(*optimizer, true, visit);
  };
  if (task.state != nullptr) {
    parts.state.emplace<StateToSave>(StateToSave{*task.state, shards});
  }
  return save_parts(parts, *task.load.run.files, place.to, at);
}

SavedCheckpoint publish(CheckpointSave& save, const SaveTask& task, const TrainedSteps& trained,
                        std::function<void()> waits) {
  std::optional<CheckpointSave::SavedState> state;
  if (task.state != nullptr) {
    state.emplace(
        CheckpointSave::SavedState{task.state->manifest(), state_json(facts_of(task, trained))});
  }
  PublishOptions options{.waits = std::move(waits)};
  if (task.from != nullptr) options.carried = &task.from->carried;
  if (task.grace_ns > 0) options.lock_limit_ns = std::min(options.lock_limit_ns, task.grace_ns / 2);
  return save.publish(task.load.run.checkpoint, task.plan, state, options);
}

}  // namespace modicum
