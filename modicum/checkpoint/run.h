// The record of a saved checkpoint: manifest.json, COMMIT, and the names under a
// root. Part of the public header of `checkpoint`.
//
//   ROOT/step-12/                  committed: complete and durable
//     model.safetensors            (or shards and an index)
//     manifest.json                the length and digest of each file, the digests of each tensor
//     COMMIT                       the digest of manifest.json
//   ROOT/.partial-13-OWNER-UUID/   in flight, or left over by a process that died; OWNER is the
//                                  host, pid and start time of the leader. While files are written
//                                  it has an owner file, .owner (owner.h)
//   ROOT/.lock                     while a checkpoint is published and old ones are removed; see
//                                  owner.h
//   ROOT/.trash-UUID/              being removed
//   ROOT/.damaged-12-UUID/         was ROOT/step-12 until a save of step 12 found it damaged; never
//                                  removed
//   ROOT/.latest-13-OWNER-UUID     the new `latest`, until it is renamed
//   ROOT/latest                    "step-12", the checkpoint saved last: for people; Modicum itself
//                                  does not read it
//
// A checkpoint can also be made inside an existing directory to which other programs write as well,
// such as a checkpoint of Trainer. The directory becomes the checkpoint; its name has no meaning:
//
//   DIR/trainer_state.json         any other file: not part of the record, and not touched, except
//                                  that weights of another save of a model are removed
//   DIR/.partial-13-OWNER-UUID/    in flight: the checkpoint's files, until they are renamed
//   DIR/COMMIT                     written last, when every file of it has its final name
//
// A directory with a `.partial-` directory and no COMMIT is an incomplete checkpoint: a failed save
// empties its `.partial-` directory, and leaves it as the mark of the failure.
//
// One rank, the leader, makes and publishes a checkpoint; all ranks write files in between. A
// checkpoint gets its name, or inside a directory its COMMIT, only after all of its files are
// durable. So after a kill or a power cut at any time, whatever counts as a checkpoint is complete.
// A save inside a directory removes the previous COMMIT when it begins, so a save that fails loses
// the previous checkpoint. Nothing that is committed depends on the wall clock, on locks or on the
// order of a directory's names.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "modicum/checkpoint/durable.h"
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// The subdirectory of a checkpoint that holds the optimizer's state, as a separate checkpoint.
constexpr const char* kStateDirectory = "optimizer";
constexpr const char* kStateFolder = "optimizer/";  // begins the names of its files in a record
// The subdirectory of a checkpoint with the files that the saving program has added.
constexpr const char* kExtraDirectory = "extra";

// A file of a checkpoint. The digest covers the first `digested_bytes` bytes. They are the header
// of a safetensors file, since its tensors have separate digests (CheckpointTensor), and all of any
// other file.
struct CheckpointFile {
  std::string name;  // relative to the checkpoint's directory
  uint64_t bytes = 0;
  uint64_t digested_bytes = 0;
  Digest digest;

  bool operator==(const CheckpointFile&) const = default;
};
// A tensor of a checkpoint, with the digest and the checksum of each 4 MiB of its elements. The
// tensor's digest is the sum of these digests modulo 2^64. No sum depends on how the saving ranks
// had sharded the tensor.
struct CheckpointTensor {
  TensorSpec spec;
  std::vector<uint64_t> chunks;
  std::vector<uint64_t> checksums;  // empty in a record of modicum 0.1, and in one that is too long

  bool operator==(const CheckpointTensor&) const = default;
};
// The content of manifest.json.
struct CheckpointRecord {
  int64_t step = 0;
  std::string uuid;    // of make_uuid
  int world_size = 0;  // of the run that saved the checkpoint
  std::string tool;    // "modicum 0.1.0"
  std::vector<CheckpointFile> files;
  std::vector<CheckpointTensor> tensors;
  std::vector<CheckpointTensor> state;  // the optimizer's tensors; empty without an optimizer

  bool operator==(const CheckpointRecord&) const = default;
};
std::string make_uuid();  // 128 random bits, as 32 hex digits
std::string record_json(const CheckpointRecord& record, bool with_checksums = true);
// At least the length of record_json, without checksums, for a checkpoint that has the tensor files
// of `parts` (weights, and the state in kStateDirectory), `others`, and further files whose entries
// take less than 1 MiB, such as those that are copied from the source.
uint64_t most_record_bytes(std::span<const Manifest* const> parts,
                           std::span<const std::string> others);
// The memory that the tensors of `part` take in a record, with their entries in record_json.
uint64_t record_bytes(const Manifest& part);
// Throws UNSUPPORTED if most_record_bytes is too long to be read again. Call it before the
// checkpoint is begun.
void require_recordable(std::span<const Manifest* const> parts,
                        std::span<const std::string> others);
// Throws UNSUPPORTED for a text that is about to be written, but which readers would refuse, since
// it is longer than `most` bytes. `file`: its name.
void require_readable(uint64_t bytes, const std::string& file, uint64_t most = kLongestText);
// Throws INTEGRITY for a text that is not a valid record, UNSUPPORTED for a record that a later
// version of Modicum has written.
CheckpointRecord parse_record(const std::string& text);
// Whether a manifest.json is the record of a checkpoint, of this version or a later one: other
// programs write files of this name, too.
bool is_record(const std::string& text);

// The number in a name such as "step-12"; empty for other names, such as "step-012".
std::optional<int64_t> step_of(std::string_view name);
// Whether the directory `path` has the name or the files of a checkpoint, committed or not.
bool is_run_checkpoint(FileSystem& files, const std::string& path);

Digest digest_of(std::string_view bytes);  // XXH3, 128 bits
// The digest of the first `bytes` bytes of a file, which are read in blocks. Throws FORMAT.TRUNC;
// IO.
Digest digest_of(File& file, uint64_t bytes);

// The process that saves or converts; see owner.h.
struct SaveOwner {
  std::string host;  // NAME.BOOT_ID.START, without '-' and '/'; see ProcessIdentity
  int64_t pid = 0;
  uint64_t started = 0;  // the kernel's start time of the process: pids are reused
};

// A checkpoint between `begin_checkpoint` and `publish_checkpoint`.
struct CheckpointInFlight {
  std::string root;  // its real path
  int64_t step = 0;
  std::string uuid;
  std::string directory;   // where the ranks write
  bool is_inside = false;  // made by begin_checkpoint_in: `root` becomes the checkpoint
  uint64_t user = 0;       // owns what the save creates; on a network file system it can be
                           // another user than the process has
  bool is_durable = true;  // whether the names of the directories made so far are
  SaveOwner owner;
  // The committed checkpoints of the root when this one began: their uuids, by number; "" of one
  // that can't be read, which the save does not remove. Empty if the save removes no checkpoint.
  std::map<int64_t, std::string> committed;
};

// The content of optimizer/state.json: facts about AdamW's state that its tensors don't hold. The
// state.json of another optimizer names that optimizer, and parse_state refuses it.
struct StateFacts {
  // As requested. state_format_of returns the format that a parameter has in fact.
  StateFormat format = StateFormat::fp32;
  uint64_t seed = 0;
  int64_t steps = 0;                        // step count of each parameter not in `steps_of`
  std::map<std::string, int64_t> steps_of;  // step counts that differ, by FQN
  std::vector<std::string> without_state;   // tensors of the model that have no state
  std::optional<uint64_t> digest;           // AdamW::digest().state, summed over the ranks

  int64_t steps_made_by(const std::string& fqn) const {
    const auto found = steps_of.find(fqn);
    return found == steps_of.end() ? steps : found->second;
  }
};
constexpr const char* kStateFile = "state.json";
// optimizer/recipe.json: the recipe that makes the parameters from the checkpoint's tensors. Absent
// if the parameters are stored as they are, under their own names.
constexpr const char* kStateRecipeFile = "recipe.json";
std::string state_json(const StateFacts& facts);
// Throws INTEGRITY for an invalid text; UNSUPPORTED for another optimizer, an unknown state format
// or other 8-bit codes.
StateFacts parse_state(const std::string& text);

// Makes the directory of a checkpoint in flight. Makes the root, too, if it is missing and its
// parent exists. `retains`: whether keep_newest will be called; it needs
// CheckpointInFlight::committed. Throws CONFLICT if the checkpoint exists already, damaged or not
// (see set_aside); IO; NOSPACE.
CheckpointInFlight begin_checkpoint(FileSystem& files, const std::string& root, int64_t step,
                                    const SaveOwner& owner, bool retains = false);
// As begin_checkpoint, but `directory` itself becomes the checkpoint. It is made if it is missing
// and its parent exists. Removes the COMMIT of a checkpoint that `directory` held before. Throws
// UNSUPPORTED if a later version has saved that checkpoint; IO; NOSPACE.
CheckpointInFlight begin_checkpoint_in(FileSystem& files, const std::string& directory,
                                       int64_t step, const SaveOwner& owner);
// Makes the checkpoint durable and visible. Its files must be complete and synced. On failure no
// checkpoint is visible; a visible checkpoint is always complete. For a checkpoint of
// begin_checkpoint_in, also removes from the directory the tensor files and the files in
// subdirectories that only the previous checkpoint had and, if the checkpoint has a whole model,
// all other files of is_weights_name. Warns if the previous checkpoint had a subdirectory that this
// one lacks, or if only writing `latest`, or removing the directory in flight, failed. Throws
// CONFLICT if another process has published the same checkpoint, which is not replaced; IO;
// NOSPACE.
Publication publish_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight,
                               const CheckpointRecord& record);
// Completes a checkpoint in `directory`, which keeps its name: writes manifest.json and COMMIT, and
// makes the names of all files durable. The checkpoint's files must be synced. The caller makes the
// directory visible. Returns whether all names are durable; see sync_directory. Throws CONFLICT if
// there is a manifest.json already; IO; NOSPACE.
bool commit_in_place(FileSystem& files, const std::string& directory,
                     const CheckpointRecord& record);
// Removes the files of a failed save. Never throws; a later save removes what could not be removed.
void discard_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight) noexcept;

// An intact checkpoint: it is committed, its record is valid, and its files have the recorded
// lengths and, except in the result of open_run_checkpoint, the recorded digests. The values of
// tensors were not read.
struct RunCheckpoint {
  int64_t step = 0;
  std::string path;
  CheckpointRecord record;
};
struct SkippedCheckpoint {
  int64_t step = 0;
  std::string reason;
};
// The stored values that a reader of a checkpoint has compared with the record.
struct ComparedValues {
  uint64_t bytes = 0;
  std::vector<std::string> not_compared;  // names of tensors that were not read, or only in part
};
// Returns the checkpoint at `path` if it is committed, its record is valid, and its files have the
// recorded lengths. Otherwise throws UNCOMMITTED or INTEGRITY, with the name of the file, or an
// error that is no damage: UNSUPPORTED (a later version), IO.
RunCheckpoint open_run_checkpoint(FileSystem& files, const std::string& path);
// As open_run_checkpoint, but also compares the digests of all files. This covers everything but
// the values of tensors.
RunCheckpoint check_run_checkpoint(FileSystem& files, const std::string& path);
// Checks the digest of a file of the checkpoint at `path`. Throws INTEGRITY with the file's name;
// IO.
void check_digest(FileSystem& files, const std::string& path, const CheckpointFile& file);

// What check_run_checkpoint finds at a checkpoint of a root: the checkpoint, or its damage. A
// checkpoint with the record of another number is damaged. Empty if there is none, or if another
// process has removed it meanwhile. Throws errors that are no damage (is_damage).
std::optional<std::variant<RunCheckpoint, SkippedCheckpoint>> examine_checkpoint(
    FileSystem& files, const std::string& root, int64_t step);
// The intact checkpoints of a root, and the damaged ones with their faults. Both lists begin with
// the newest checkpoint. Neither has a checkpoint that another process removed while it was read.
struct FoundCheckpoints {
  std::vector<RunCheckpoint> found;
  std::vector<SkippedCheckpoint> skipped;
  bool was_one_removed = false;
};
// Examines the checkpoints from the newest on, and stops after `most` intact ones. With `before`,
// only checkpoints with a smaller number count. Throws the errors of examine_checkpoint, so that no
// checkpoint is skipped for an IO error that may pass.
FoundCheckpoints find_checkpoints(FileSystem& files, const std::string& root,
                                  size_t most = SIZE_MAX, std::optional<int64_t> before = {});
// Returns the newest intact checkpoint that is older than the checkpoints in `skipped`, to which it
// adds the damaged ones that it has skipped. If another process removes a checkpoint meanwhile,
// chooses again, once. Throws UNCOMMITTED, with the first reason in `skipped`, if there is no
// intact checkpoint; the errors of find_checkpoints.
RunCheckpoint newest_checkpoint(FileSystem& files, const std::string& root,
                                std::vector<SkippedCheckpoint>& skipped);

// A damaged checkpoint that was renamed to `path`, .damaged-N-UUID in its root.
struct DamagedCheckpoint {
  int64_t step = 0;
  std::string path;
  std::string reason;
  uint64_t bytes = 0;  // of all files
};
// The number in a name such as ".damaged-12-UUID"; empty for other names.
std::optional<int64_t> damaged_step_of(std::string_view name);
// The size of all files in a directory; does not follow links.
uint64_t bytes_below(FileSystem& files, const std::string& directory);
// The uuid in the COMMIT of the checkpoint at `path`; empty if there is no valid one.
std::optional<std::string> committed_uuid(FileSystem& files, const std::string& path);
// Renames the damaged checkpoint `step`, so that a new one can have its number. `uuid`:
// committed_uuid before the checkpoint was read. Throws CONFLICT, and renames nothing, if another
// process has replaced the checkpoint since; IO.
DamagedCheckpoint set_aside(FileSystem& files, const std::string& root, SkippedCheckpoint damaged,
                            const std::optional<std::string>& uuid);

// Removes old checkpoints, so that `keep` intact ones are left: the published `in_flight`,
// which always stays, and those with the highest numbers of the others. Reads the others by
// check_run_checkpoint, newest first, until enough are intact; damaged ones of these neither count
// nor go. Of the rest reads only COMMIT. Removes only checkpoints that were committed when
// `in_flight` began, and only while `in_flight` is in its place. So of saves that run at the same
// time none removes the checkpoint of another, and the checkpoint that was published last is never
// removed. Of a checkpoint that is a symbolic link only the link is removed. Returns a warning that
// names the checkpoints that could not be removed, or that belong to another user; or an error that
// is no damage, such as IO, after which nothing more was removed.
std::optional<std::string> keep_newest(FileSystem& files, const CheckpointInFlight& in_flight,
                                       size_t keep);
// Removes trash, and directories and new `latest` files that dead processes have left in flight,
// from the root of `in_flight`. A directory or file in flight stays if its owner is not known to be
// dead (OwnerCheck); `is_dead` is asked about owners that have only a name. What is a symbolic
// link, what belongs to another user and what can't be removed stays, too. Returns a warning for
// each name that stays.
std::vector<std::string> remove_leftovers(FileSystem& files, const CheckpointInFlight& in_flight,
                                          const std::function<bool(const SaveOwner&)>& is_dead);

}  // namespace modicum
