#include "modicum/training/save_parts.h"

namespace modicum {
namespace {

class PartsSaver {
 public:
  PartsSaver(FileSystem& files, uint64_t point, const RankContext& at, Snapshot* snapshot)
      : files_(files), point_(point), at_(at), snapshot_(snapshot) {}

  void save_tensors(const TensorsToSave& tensors, const std::string& directory) {
    const SaveFiles to{files_, directory};
    ChunkSums sums(tensors.plan.manifest(), point_);
    add(save({.source = tensors.source,
              .plan = tensors.plan,
              .at = at_,
              .from = tensors.from,
              .threads = tensors.threads,
              .snapshot = snapshot_,
              .compared = tensors.compared},
             to, sums));
    if (tensors.compared != nullptr) tensors.compared->compare();
    hand_over_sums(sums, at_.rank, to);
  }

  void save_state(const StateToSave& state, int ranks, const std::string& directory) {
    const SaveFiles to{files_, directory};
    ChunkSums sums(state.files.manifest(), point_);
    const auto spans = [&state](FunctionRef<void(const StoredSpan&)> fn) {
      state.files.for_each_span(state.shards, fn);
    };
    add(save_spans({state.files.manifest(), at_, ranks, snapshot_}, spans, to, sums));
    hand_over_sums(sums, at_.rank, to);
  }

  const SaveOutcome& outcome() const noexcept { return outcome_; }

 private:
  void add(const SaveOutcome& part) {
    outcome_.written_bytes += part.written_bytes;
    outcome_.read_bytes += part.read_bytes;
    outcome_.gathered_bytes += part.gathered_bytes;
  }

  FileSystem& files_;
  const uint64_t point_;
  const RankContext& at_;
  Snapshot* const snapshot_;
  SaveOutcome outcome_;
};

}  // namespace

SaveOutcome save_parts(const SaveParts& parts, FileSystem& files, const PartialCheckpoint& to,
                       const RankContext& at, Snapshot* snapshot) {
  const ReportedPhase phase(at.ledger->reporter(), "save");
  const auto* const state = std::get_if<StateToSave>(&parts.state);
  const auto* const other_state = std::get_if<TensorsToSave>(&parts.state);
  // The manifest and the sums of the state's files, until the end of the save.
  const Footprint needed = state != nullptr ? state->files.footprint() : Footprint{};
  const Charge header = at.ledger->adopt(Purpose::header, needed[Purpose::header]);
  const Charge plan = at.ledger->adopt(Purpose::plan, needed[Purpose::plan]);
  PartsSaver saver(files, to.point, at, snapshot);
  saver.save_tensors(parts.model, to.directory);
  if (state != nullptr) {
    saver.save_state(*state, parts.model.plan.plan().ranks(), to.state_directory());
  }
  if (other_state != nullptr) saver.save_tensors(*other_state, to.state_directory());
  return saver.outcome();
}

}  // namespace modicum
