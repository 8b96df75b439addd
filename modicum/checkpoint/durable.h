// Small files that survive a power cut. Part of the door of `checkpoint`.
#pragma once

#include <string>

#include "modicum/io/io.h"

namespace modicum {

// Creates a file with this text and syncs it, but not its directory. CONFLICT if it exists; IO,
// NOSPACE.
void write_durably(FileSystem& files, const std::string& path, const std::string& text);
// Replaces file `name` of `directory` atomically, by writing and renaming the file `temporary`:
// after a power cut either the old file or the new one is there.
struct Replacement {
  std::string directory, name, temporary;
};
void replace_durably(FileSystem& files, const Replacement& of, const std::string& text);
// Removes a file, or a directory with everything in it.
void remove_tree(FileSystem& files, const std::string& path);

}  // namespace modicum
