// Files of the Hugging Face cache, which are named by their content. Part of the public header of
// `checkpoint`.
//
//   models--org--name/snapshots/REV/model.safetensors -> ../../blobs/SHA256
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/io/io.h"

namespace modicum {

// The SHA-256 that a file of the cache must have, as 64 hex digits. Empty for files that the Hub
// keeps in plain git, which the cache names by git's SHA-1, and for files outside a cache.
std::optional<std::string> blob_sha256(FileSystem& files, const std::string& path);
// Throws INTEGRITY, with both digests, if the content of the file has another SHA-256; IO.
// Uses a buffer of 1 MiB. Calls `poll` before each read; exceptions of `poll` reach the caller.
void check_sha256(FileSystem& files, const std::string& path, const std::string& expected,
                  FunctionRef<void()> poll);

// The real paths of a checkpoint's directory and, if that is in the cache, of its blobs.
std::vector<std::string> own_directories(FileSystem& files, const std::string& directory);

}  // namespace modicum
