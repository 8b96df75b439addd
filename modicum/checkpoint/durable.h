// Files that survive a power cut. Part of the public header of `checkpoint`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Creates a file with this text and syncs the file, but not its directory. Throws CONFLICT if the
// file exists; IO; NOSPACE.
void write_durably(FileSystem& files, const std::string& path, const std::string& text);
struct CopiedFile {
  uint64_t bytes = 0;
  Digest digest;  // digest_of the bytes
};
// As write_durably, with the content of `from`, which is copied in blocks. If `from` changes
// meanwhile, removes the new file and returns nullopt.
std::optional<CopiedFile> copy_durably(File& from, FileSystem& files, const std::string& path);
// The file to be replaced, and the name of the new file until it is complete.
struct Replacement {
  std::string directory, name, temporary;
};
// Replaces the file atomically: writes and syncs the temporary file, then renames it. After a power
// cut the directory has either the old file or the new one. Throws IO or NOSPACE.
void replace_durably(FileSystem& files, const Replacement& file, const std::string& text);

}  // namespace modicum
