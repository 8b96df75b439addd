// The leader's part of a saved step: its directory, its record, its commit. Part of the door of
// `training`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// A step that was published.
struct SavedStep {
  int64_t step = 0;
  std::string path;
  StepRecord record;
  uint64_t written_bytes = 0;  // by the leader: companions, index, manifest
  std::vector<std::string> warnings;
};

// A file of a step in kExtraDirectory or kStateDirectory, which must exist: its name with that
// prefix, and its text; none: a rank has written it there, durably.
struct NewFile {
  std::string name;
  std::optional<std::string> text;
};

// Construct before the ranks save. They write into `directory()`, each with the sums of `point()`,
// and hand over their sums with hand_over_sums. Once all have, the leader calls `publish`. The
// destructor removes the written files unless the step was published. One thread.
class StepSave {
 public:
  // Also removes what dead processes of this host have left in the root. `has_state`: makes the
  // directory of an optimizer's state. Errors of begin_step.
  StepSave(FileSystem& files, const std::string& root, int64_t step, bool has_state = false);
  ~StepSave();
  StepSave(const StepSave&) = delete;
  StepSave& operator=(const StepSave&) = delete;

  const std::string& directory() const noexcept { return step_.directory; }
  std::string state_directory() const { return join_path(step_.directory, kStateDirectory); }
  uint64_t point() const;  // of ChunkSums
  // INTEGRITY, naming the tensor, if not every element was written exactly once; CONFLICT if the
  // step was published by another process; errors of publish_step.
  // `state`: what the ranks have saved of an optimizer's, if anything.
  struct SavedState {
    const Manifest& manifest;
    std::string facts;  // the text of kStateFile
  };
  // `more`: files of the caller's.
  SavedStep publish(const Checkpoint& source, const SavePlan& plan,
                    const std::optional<SavedState>& state = {},
                    const std::vector<NewFile>& more = {});

 private:
  void add_part(SavedStep& saved, const std::string& prefix, const Manifest& manifest,
                std::vector<StepTensor>& tensors);
  void merge_sums(ChunkSums& sums, const std::string& prefix, int ranks);
  void copy_companions(const Checkpoint& source, const SavePlan& plan, SavedStep& saved);
  void add_file(SavedStep& saved, const std::string& name, const std::string& text);
  void add_written(SavedStep& saved, const NewFile& file);

  FileSystem& files_;
  std::vector<std::string> left_;
  const StepInFlight step_;
  bool is_published_ = false;
};

// Writes what rank `rank` has written next to the files, for the leader.
void hand_over_sums(const ChunkSums& sums, int rank, const SaveFiles& to);

}  // namespace modicum
