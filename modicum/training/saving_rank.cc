#include "modicum/training/saving_rank.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace modicum {
namespace {

SaveOutcome save_state(const SaveTask& task, const SavePlace& place, const RankContext& at,
                       const RankOptimizer& optimizer) {
  const StateFiles& state = *task.state;
  ChunkSums sums(state.manifest(), place.point);
  const auto spans = [&](FunctionRef<void(const StoredSpan&)> fn) {
    const auto shards = [&](FunctionRef<void(const HeldShard&)> visit) {
      for_each_held(optimizer, true, visit);
    };
    state.for_each_span(shards, fn);
  };
  const SaveFiles to{*task.load.run.files, place.state_directory};
  const SaveOutcome saved =
      save_spans({state.manifest(), at, task.load.plan.ranks()}, spans, to, sums);
  hand_over_sums(sums, at.rank, to);
  return saved;
}

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
  const ReportedPhase phase(at.ledger->reporter(), "save");
  if (at.gather != nullptr) at.gather->commit(*at.ledger);
  // The manifest and the sums of the state's files, until the end of the save.
  const Footprint state = task.state != nullptr ? task.state->footprint() : Footprint{};
  const Charge header = at.ledger->adopt(Purpose::header, state[Purpose::header]);
  const Charge plan = at.ledger->adopt(Purpose::plan, state[Purpose::plan]);
  const SaveFiles to{*task.load.run.files, place.directory};
  ChunkSums sums(task.plan.manifest(), place.point);
  SaveOutcome outcome = save({.source = task.load.run.checkpoint,
                              .plan = task.plan,
                              .at = at,
                              .from = loaded.shards(),
                              .threads = task.load.threads,
                              .compared = &loaded.compared()},
                             to, sums);
  loaded.compared().compare();
  hand_over_sums(sums, at.rank, to);
  if (task.state == nullptr) return outcome;
  MODICUM_ASSERT(optimizer != nullptr);
  const SaveOutcome of_state = save_state(task, place, at, *optimizer);
  outcome.written_bytes += of_state.written_bytes;
  outcome.gathered_bytes += of_state.gathered_bytes;
  return outcome;
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
