// Files of the Hugging Face cache, which are named by their content. Part of the door of
// `checkpoint`.
//
//   models--org--name/snapshots/REV/model.safetensors -> ../../blobs/SHA256
#pragma once

#include <optional>
#include <string>

#include "modicum/base/base.h"
#include "modicum/io/io.h"

namespace modicum {

// The SHA-256 that a file of the cache must have, 64 hex digits; none for other files, and for
// small files of the cache, which are named by git's SHA-1.
std::optional<std::string> blob_sha256(FileSystem& files, const std::string& path);
// INTEGRITY, with both digests, if the content of the file has another SHA-256. Holds 1 MiB; `poll`
// is called before each read, and an exception from it ends the call. IO.
void check_sha256(FileSystem& files, const std::string& path, const std::string& expected,
                  FunctionRef<void()> poll);

}  // namespace modicum
