// Internal to `checkpoint`: the parts that both forms of a checkpoint share, ROOT/step-N and a
// checkpoint inside the directory of another program (run_inside.cc), and that readers share with
// them.
#pragma once

#include <string>

#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/run.h"

namespace modicum {

constexpr const char* kCommit = "COMMIT";

// Makes the directory of `in_flight`, whose other members are set.
void make_in_flight(FileSystem& files, const SaveOwner& owner, CheckpointInFlight& in_flight);
// Syncs the directories in a checkpoint. Returns whether all of them are durable.
bool sync_directories(FileSystem& files, const std::string& checkpoint);
// The text of COMMIT. `manifest`: the text of manifest.json.
std::string commit_json(const CheckpointRecord& record, const std::string& manifest);
// The text of a file of a checkpoint. Throws INTEGRITY if it is missing, not a regular file, or too
// long.
std::string text_of(FileSystem& files, const std::string& directory, const std::string& name);
// Whether a file of a checkpoint's record holds tensors, or is the index of those that do.
inline bool has_tensors(const CheckpointFile& file) {
  return file.name.ends_with(".safetensors") || file.name == kIndexFile;
}
// Whether a directory has the manifest.json of a checkpoint. No record is too long for a reader, so
// one that is belongs to another program.
bool has_record(FileSystem& files, const std::string& path);
// As publish_checkpoint, for a checkpoint of begin_checkpoint_in whose manifest.json is written.
Publication publish_inside(FileSystem& files, const CheckpointInFlight& in_flight,
                           const CheckpointRecord& record, const std::string& manifest);

}  // namespace modicum
