// Files that survive a power cut. Part of the public header of `checkpoint`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// A checkpoint or the output of a conversion that is visible to readers.
struct Publication {
  // Whether it survives a power cut. False where the file system can't sync a directory, or where
  // that failed and the name could not be taken back.
  bool is_durable = true;
  std::vector<std::string> warnings;
  // Whether a sync failed, and the name could not be taken back: after a power cut the result may
  // be gone.
  bool may_vanish = false;

  // Takes in a result of sync_directory, of a name that this depends on. The first false adds a
  // warning.
  void depend_on(bool is_name_durable);
  void take_in(Publication other);
};
// Calls `make_durable`, after a name has become visible. If that fails, calls `take_back`, which
// removes the name, and rethrows the error. If the name can't be taken back, it stays visible, and
// the result warns of it.
Publication make_durable_or_take_back(FunctionRef<bool()> make_durable,
                                      FunctionRef<void()> take_back);
// Renames a complete directory to the path `to`, durably. On failure `to` is not visible. Throws
// CONFLICT if there is anything at `to`; IO; NOSPACE.
Publication publish_directory(FileSystem& files, const std::string& from, const std::string& to);

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
// cut the directory has either the old file or the new one. Returns sync_directory's result. Throws
// IO or NOSPACE.
bool replace_durably(FileSystem& files, const Replacement& file, const std::string& text);
// As replace_durably, but does not sync the directory.
void replace(FileSystem& files, const Replacement& file, const std::string& text);

// Makes the directory unless it exists. Returns whether it did not; another process may make it at
// the same time. Its name is not durable yet. Throws IO, NOSPACE.
bool ensure_directory(FileSystem& files, const std::string& path);

}  // namespace modicum
