// Internal to `checkpoint`: the parts that both forms of a checkpoint share, ROOT/step-N and a
// checkpoint inside the directory of another program (step_inside.cc), and that readers share with
// them.
#pragma once

#include <string>

#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/step.h"

namespace modicum {

constexpr const char* kCommit = "COMMIT";

// Makes the directory in flight of `step`, whose other members are set.
void make_in_flight(FileSystem& files, const StepOwner& owner, StepInFlight& step);
// Syncs the directories in a checkpoint. Returns whether all of them are durable.
bool sync_directories(FileSystem& files, const std::string& step);
// The text of COMMIT. `manifest`: the text of manifest.json.
std::string commit_json(const StepRecord& record, const std::string& manifest);
// The text of a file of a checkpoint. Throws INTEGRITY if it is missing, not a regular file, or too
// long.
std::string text_of(FileSystem& files, const std::string& directory, const std::string& name);
// As publish_step, for a checkpoint of begin_step_in whose manifest.json is written.
Publication publish_inside(FileSystem& files, const StepInFlight& step, const StepRecord& record,
                           const std::string& manifest);

}  // namespace modicum
