// The record of a saved step: manifest.json, COMMIT, and the names under a root. Part of the door
// of `checkpoint`.
//
//   ROOT/step-12/                  committed: complete, and durable
//     model.safetensors            (or shards and an index)
//     manifest.json                every file's length and digest, every tensor's digests
//     COMMIT                       the digest of manifest.json
//   ROOT/.partial-13-UUID/         in flight, or left over by a process that died
//   ROOT/.owner-UUID               host and process of that save
//   ROOT/.trash-UUID/              being removed
//   ROOT/latest                    "step-12": for people; nothing here reads it
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

// Where the state of an optimizer is in a step: a checkpoint of its own.
constexpr const char* kStateDirectory = "optimizer";
// Where a step has what the program that saved it has added.
constexpr const char* kExtraDirectory = "extra";

// A file of a step. The digest is over its first `digested_bytes`: of a safetensors file the
// header, whose tensors have digests of their own; of others the whole file.
struct StepFile {
  std::string name;  // of one in kStateDirectory or kExtraDirectory with that prefix
  uint64_t bytes = 0;
  uint64_t digested_bytes = 0;
  Digest digest;

  bool operator==(const StepFile&) const = default;
};
// A tensor of a step: the digest of each 4 MiB of its elements. Their sum modulo 2^64 is the
// tensor's; both are independent of the layout that wrote them.
struct StepTensor {
  TensorSpec spec;
  std::vector<uint64_t> chunks;

  bool operator==(const StepTensor&) const = default;
};
// manifest.json.
struct StepRecord {
  int64_t step = 0;
  std::string uuid;
  int world_size = 0;  // of the ranks that saved it
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

// The process that saves a step, so that its leftovers can be told from a save that is in flight.
struct StepOwner {
  std::string host;
  int64_t pid = 0;
  uint64_t started = 0;  // the kernel's start time of the process: pids are reused
};

// A step between `begin_step` and `publish_step`.
struct StepInFlight {
  std::string root;
  int64_t step = 0;
  std::string uuid;
  std::string directory;  // where the ranks write
};

// optimizer/state.json: what a step's state belongs to. A state of another optimizer has a
// state.json of its own, with its name.
struct StateFacts {
  StateFormat format = StateFormat::fp32;  // as asked for
  uint64_t seed = 0;
  int64_t steps = 0;                        // that every parameter has made
  std::map<std::string, int64_t> steps_of;  // of those that have made another number
  std::vector<std::string> without_state;   // parameters that are not trained

  int64_t steps_made_by(const std::string& fqn) const {
    const auto found = steps_of.find(fqn);
    return found == steps_of.end() ? steps : found->second;
  }
};
constexpr const char* kStateFile = "state.json";
std::string state_json(const StateFacts& facts);
StateFacts parse_state(const std::string& text);  // INTEGRITY

// Makes the directory of a step in flight; the root is made if its parent exists. CONFLICT if the
// step is there already; IO, NOSPACE.
StepInFlight begin_step(FileSystem& files, const std::string& root, int64_t step,
                        const StepOwner& owner);
// Makes the step durable and visible. The files must be complete and synced. On success the step
// survives a power cut; on failure nothing is visible, unless the failure came after the rename: a
// step that is visible is complete in any case. Returns a warning if only `latest` failed. CONFLICT
// if another process has published the same step; IO, NOSPACE.
std::optional<std::string> publish_step(FileSystem& files, const StepInFlight& step,
                                        const StepRecord& record);
// Removes what a failed save has written. Never throws: what can't be removed is left over.
void discard_step(FileSystem& files, const StepInFlight& step) noexcept;

// A committed step whose record and file lengths were read and found right; no data is read.
struct FoundStep {
  int64_t step = 0;
  std::string path;
  StepRecord record;
};
struct SkippedStep {
  int64_t step = 0;
  std::string reason;
};
// The committed steps of a root, newest first, and those that are not whole, with the reasons. IO
// if the root can't be listed.
struct Steps {
  std::vector<FoundStep> found;
  std::vector<SkippedStep> skipped;
};
// Stops after `most` whole steps.
Steps find_steps(FileSystem& files, const std::string& root, size_t most = SIZE_MAX);
// The step at `path` if it is whole; else UNCOMMITTED or INTEGRITY, naming the file.
FoundStep open_step(FileSystem& files, const std::string& path);
// The newest whole step; UNCOMMITTED, with the reason of the newest skipped one, if there is none.
FoundStep newest_step(FileSystem& files, const std::string& root,
                      std::vector<SkippedStep>& skipped);

// Removes whole steps but the `keep` newest ones, at least one. Steps that are not whole are
// neither counted nor removed.
void keep_newest(FileSystem& files, const std::string& root, size_t keep);
// Removes what dead processes have left in flight and in the trash. `is_dead` decides; it is not
// asked about saves whose owner can't be read. Returns the names of the steps that were left.
std::vector<std::string> remove_leftovers(FileSystem& files, const std::string& root,
                                          const std::function<bool(const StepOwner&)>& is_dead);

}  // namespace modicum
