// The leader's part of a save: makes the directory, writes
// the record and commits. Part of the public header of `training`.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/stream/stream.h"
#include "modicum/training/state_files.h"

namespace modicum {

// As require_recordable of a record, for a save. `state`: null without an optimizer.
void require_recordable(const SavePlan& plan, const Manifest* state,
                        std::span<const std::string> others = {});

// The text of kStateRecipeFile; `plan` would load the saved checkpoint. Empty if every target is
// loaded as stored, under its own name. Leaves out caller-provided targets, since a checkpoint does
// not have them.
std::optional<std::string> state_recipe_text(const Plan& plan);

// A published checkpoint.
struct SavedCheckpoint {
  int64_t step = 0;
  std::string path;
  CheckpointRecord record;
  uint64_t written_bytes = 0;  // all files but the data files
  bool is_durable = true;      // Publication::is_durable
  int64_t durable_ns = 0;      // by SteadyClock
  std::vector<std::string> warnings;
};

// A further file of a checkpoint. `name` may be in kExtraDirectory or kStateDirectory, which must
// then exist. Without `text` a rank must have written and synced the file.
struct NewFile {
  std::string name;
  std::optional<std::string> text;
};

// Files of another checkpoint that a save copies: the options of the optimizer's groups, and a
// program's own values (kExtraDirectory). The new record has that checkpoint's world size, since
// some of the values are each rank's own.
struct CarriedFiles {
  CarriedFiles() = default;
  // `state`: the manifest of the checkpoint's state.
  CarriedFiles(const RunCheckpoint& resumed, const Manifest& state);

  std::string directory;  // the checkpoint
  std::vector<CheckpointFile> files;
  int world_size = 0;
};

// What CheckpointSave::publish does besides.
struct PublishOptions {
  std::vector<NewFile> more;              // files of the caller
  const CarriedFiles* carried = nullptr;  // none
  std::optional<Vocabulary> vocabulary;   // for config.json, if it is not the source's
  // How long it waits for a save that publishes in the same root; then it goes on, with a
  // warning.
  int64_t lock_limit_ns = kRootLockNs;
  std::function<void()> waits = [] {};  // called meanwhile; may throw
};

// Call it before a save of `step`. If the root has a checkpoint of this number, reads all of it, on
// several threads, and renames it if it is damaged; see set_aside. An intact one stays, and so does
// a link or a file of this name: begin_checkpoint refuses them. Calls `poll` before each read, on
// any thread; see verify_checkpoint. Throws errors of the reads that are no damage (is_damage).
std::optional<DamagedCheckpoint> set_damaged_aside(FileSystem& files, const std::string& root,
                                                   int64_t step, FunctionRef<void()> poll);
std::string warning_of(const DamagedCheckpoint& damaged);

// Construct it before the ranks save. Each rank writes into `directory()`, with ChunkSums at
// `point()`, and then calls hand_over_sums. After all ranks the leader calls `publish`. The
// destructor removes the written files unless the checkpoint was published. Not thread-safe. The
// process that constructs it owns the checkpoint (owner.h); in a forked child the destructor does
// nothing.
class CheckpointSave {
 public:
  // Also removes files that dead processes have left in the root. `has_state`: makes
  // the directory of an optimizer's state. `keep`: the number of intact checkpoints to keep; empty:
  // all. Throws the errors of begin_checkpoint.
  CheckpointSave(FileSystem& files, const std::string& root, int64_t step, bool has_state = false,
                 std::optional<size_t> keep = {});
  // The checkpoint becomes `inside.directory` itself; see begin_checkpoint_in. The source's files
  // that are not tensors, such as its tokenizer, are copied only if the directory has no file of
  // that name, and are not in the record: others may replace them.
  struct OuterDirectory {
    std::string directory;
  };
  CheckpointSave(FileSystem& files, const OuterDirectory& inside, int64_t step);
  ~CheckpointSave();
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  const std::string& directory() const noexcept { return in_flight_.directory; }  // its real path
  uint64_t point() const;                                                         // for ChunkSums
  // The optimizer's state that the ranks have saved.
  struct SavedState {
    const Manifest& manifest;
    std::string facts;  // the text of kStateFile
  };
  // Proves the sums, writes the other files and the record, and commits. Then removes old
  // checkpoints of the root, if `keep` was given; see keep_newest. Throws INTEGRITY, naming the
  // tensor, if an element was not written exactly once; CONFLICT if another process has published
  // the checkpoint, or has taken this one for left over; and the errors of publish_checkpoint.
  SavedCheckpoint publish(const Checkpoint& source, const SavePlan& plan,
                          const std::optional<SavedState>& state = {},
                          const PublishOptions& options = {});

 private:
  std::vector<CheckpointTensor> add_part(SavedCheckpoint& saved, const std::string& prefix,
                                         const Manifest& manifest);
  void add_companions(const Checkpoint& source, const ConfigChange& change, SavedCheckpoint& saved);
  void place_companion(SavedCheckpoint& saved, const CheckpointFile& file);
  void add_file(SavedCheckpoint& saved, const std::string& name, const std::string& text);
  void add_record(SavedCheckpoint& saved, CheckpointFile file);
  void add_written(SavedCheckpoint& saved, const NewFile& file);
  void add_carried(SavedCheckpoint& saved, const CarriedFiles& carried);
  void commit(const PublishOptions& options, SavedCheckpoint& saved);

  FileSystem& files_;
  const std::string root_;  // as the caller has named it
  const std::optional<size_t> keep_;
  const CheckpointInFlight in_flight_;
  const int pid_;
  std::unique_ptr<OwnerFile> owner_;
  const std::vector<std::string> warnings_;  // of what remains of other saves
  bool is_published_ = false;
};

}  // namespace modicum
