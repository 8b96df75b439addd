// What one rank writes in a save, in every front. Part of the public header of `training`.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// The tensors of a plan, in the buffers of this rank. The members are those of SaveRun.
struct TensorsToSave {
  const Checkpoint& source;
  const SavePlan& plan;
  Sink& from;
  int threads = 1;
  ComparedChunks* compared = nullptr;  // compared before the sums are handed over
};

// The state tensors of AdamW. `shards`: those of which this rank holds the primary replica.
struct StateToSave {
  const StateFiles& files;
  HeldShards shards;
};

struct SaveParts {
  TensorsToSave model;
  std::variant<std::monostate, StateToSave, TensorsToSave> state;  // none, AdamW's or another's
};

// Where all ranks write: the directory of a CheckpointSave, by a path without links, and its point.
struct PartialCheckpoint {
  std::string directory;
  uint64_t point = 0;  // for ChunkSums

  std::string state_directory() const { return join_path(directory, kStateDirectory); }
};

// Saves this rank's elements, first the model's. All ranks call it at the same time; with a
// `snapshot`, which must expect all writes, at any time and on any thread. Throws the errors of
// save; INTEGRITY if a copied value of the source is not the saved one.
SaveOutcome save_parts(const SaveParts& parts, FileSystem& files, const PartialCheckpoint& to,
                       const RankContext& at, Snapshot* snapshot = nullptr);

}  // namespace modicum
