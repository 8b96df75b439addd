// The record of a saved step: manifest.json, COMMIT, and the names under a root. Part of the door
// of `checkpoint`.
//
//   ROOT/step-12/                  committed: complete, and durable
//     model.safetensors            (or shards and an index)
//     manifest.json                every file's length and digest, every tensor's digests
//     COMMIT                       the digest of manifest.json
//   ROOT/.partial-13-OWNER-UUID/   in flight, or left over by a process that died; OWNER is the
//                                  host, pid and start time of the leader
//   ROOT/.trash-UUID/              being removed
//   ROOT/latest                    "step-12": for people; Modicum never reads it
//
// A step may also be made inside a directory that exists and that others write to as well, as the
// checkpoints of Trainer are. The directory itself becomes the step; its own name has no meaning:
//
//   DIR/trainer_state.json         any other file: not part of the record, and not touched
//   DIR/.partial-13-OWNER-UUID/    in flight: all files of the step, until they are renamed into
//   DIR DIR/COMMIT                     written last, when every file of the step has its name
//
// Such a directory is a step of Modicum's that is not whole if it has a name in flight, but no
// COMMIT: a failed save leaves the empty directory in flight.
//
// One rank, the leader, makes and publishes a step; all ranks write files in between. A step is
// visible under its name only once all of it is durable, so a kill or a power cut at any time
// leaves either the step or the state before it. Nothing depends on clocks, locks or the order of
// a directory's names.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// The subdirectory of a step that holds the optimizer's state, as a checkpoint of its own.
constexpr const char* kStateDirectory = "optimizer";
// Where a step has what the program that saved it has added.
constexpr const char* kExtraDirectory = "extra";

// A file of a step. The digest covers its first `digested_bytes`: the header of a safetensors file
// (its tensors have digests of their own), the whole of any other file.
struct StepFile {
  std::string name;  // relative to the step's directory
  uint64_t bytes = 0;
  uint64_t digested_bytes = 0;
  Digest digest;

  bool operator==(const StepFile&) const = default;
};
// A tensor of a step, with the digest of each 4 MiB of its elements. The tensor's digest is their
// sum modulo 2^64. None of them depends on the layout that wrote the tensor.
struct StepTensor {
  TensorSpec spec;
  std::vector<uint64_t> chunks;

  bool operator==(const StepTensor&) const = default;
};
// manifest.json.
struct StepRecord {
  int64_t step = 0;
  std::string uuid;
  int world_size = 0;  // of the run that saved it
  std::string tool;    // "modicum 0.1.0"
  std::vector<StepFile> files;
  std::vector<StepTensor> tensors;
  std::vector<StepTensor> state;  // of the optimizer; empty without one

  bool operator==(const StepRecord&) const = default;
};
std::string record_json(const StepRecord& record);
// INTEGRITY for a text that record_json did not write; UNSUPPORTED for a later version.
StepRecord parse_record(const std::string& text);

Digest digest_of(std::string_view bytes);  // XXH3, 128 bits

// The process that saves a step. Tells the leftovers of a dead process from a save in flight.
struct StepOwner {
  std::string host;  // without '-' and '/'; see ProcessIdentity
  int64_t pid = 0;
  uint64_t started = 0;  // the kernel's start time of the process: pids are reused
};

// A step between `begin_step` and `publish_step`.
struct StepInFlight {
  std::string root;
  int64_t step = 0;
  std::string uuid;
  std::string directory;   // where the ranks write
  bool is_inside = false;  // made by begin_step_in: `root` becomes the step
};

// optimizer/state.json: the facts about an optimizer's state that its tensors don't hold. The state
// of another optimizer has a state.json of its own, with the optimizer's name.
struct StateFacts {
  StateFormat format = StateFormat::fp32;  // as requested
  uint64_t seed = 0;
  int64_t steps = 0;                        // of every parameter that is not in `steps_of`
  std::map<std::string, int64_t> steps_of;  // by FQN
  std::vector<std::string> without_state;   // parameters that are not trained
  std::optional<uint64_t> digest;           // AdamW::digest().state, summed over the ranks

  int64_t steps_made_by(const std::string& fqn) const {
    const auto found = steps_of.find(fqn);
    return found == steps_of.end() ? steps : found->second;
  }
};
constexpr const char* kStateFile = "state.json";
// optimizer/recipe.json: how the parameters are made of the step's tensors (a recipe, see
// `recipe`). Absent if all of them are stored under their own names, and no other tensor is.
constexpr const char* kStateRecipeFile = "recipe.json";
std::string state_json(const StateFacts& facts);
StateFacts parse_state(const std::string& text);  // INTEGRITY

// Makes the directory of a step in flight; the root is made if its parent exists. CONFLICT if the
// step exists already; IO, NOSPACE.
StepInFlight begin_step(FileSystem& files, const std::string& root, int64_t step,
                        const StepOwner& owner);
// The same inside `directory`, which is made if its parent exists. A step that it held before is no
// longer committed. IO, NOSPACE.
StepInFlight begin_step_in(FileSystem& files, const std::string& directory, int64_t step,
                           const StepOwner& owner);
// Makes the step durable and visible. Its files must be complete and synced. On success the step
// survives a power cut. On failure no step is visible, unless the failure came after the rename; a
// visible step is always complete. Returns a warning if only writing `latest`, or removing the
// directory in flight, failed. CONFLICT if another process has published the same step; IO,
// NOSPACE. Inside a directory: also removes the tensors' files of the step that it held before.
std::optional<std::string> publish_step(FileSystem& files, const StepInFlight& step,
                                        const StepRecord& record);
// Completes a step in a directory without a name in flight: writes manifest.json and COMMIT, and
// makes the names of all files durable. The step's files must be synced. The caller makes the
// directory visible. IO, NOSPACE; CONFLICT if it has a manifest.
void commit_in_place(FileSystem& files, const std::string& directory, const StepRecord& record);
// Removes the files of a failed save. Never throws; a later save removes the rest.
void discard_step(FileSystem& files, const StepInFlight& step) noexcept;

// A committed step whose record is valid and whose files have the recorded lengths. Their data was
// not read.
struct FoundStep {
  int64_t step = 0;
  std::string path;
  StepRecord record;
};
struct SkippedStep {
  int64_t step = 0;
  std::string reason;
};
// The intact steps of a root, newest first, and the damaged ones, each with its fault. IO if the
// root can't be listed.
struct Steps {
  std::vector<FoundStep> found;
  std::vector<SkippedStep> skipped;
};
// Stops after `most` intact steps.
Steps find_steps(FileSystem& files, const std::string& root, size_t most = SIZE_MAX,
                 std::optional<int64_t> before = {});
// The step at `path` if it is intact; else UNCOMMITTED or INTEGRITY, naming the file.
FoundStep open_step(FileSystem& files, const std::string& path);
// Compares the digested part of a file of the step at `path` with its record. INTEGRITY, naming the
// file; IO.
void check_digest(FileSystem& files, const std::string& path, const StepFile& file);
// The newest intact step in which also the digested part of every file is as recorded: all but the
// values of tensors. UNCOMMITTED, with the fault of the newest damaged step, if there is none.
// `before`: only steps with a smaller number count.
FoundStep newest_step(FileSystem& files, const std::string& root, std::vector<SkippedStep>& skipped,
                      std::optional<int64_t> before = {});

// Removes all intact steps but the `keep` newest ones (at least one). Damaged steps are neither
// counted nor removed.
void keep_newest(FileSystem& files, const std::string& root, size_t keep);
// Removes what dead processes have left in flight, and the trash. A directory in flight stays if
// its name has no owner, or if `is_dead` is false for it. Returns the names of those that stay.
std::vector<std::string> remove_leftovers(FileSystem& files, const std::string& root,
                                          const std::function<bool(const StepOwner&)>& is_dead);

}  // namespace modicum
