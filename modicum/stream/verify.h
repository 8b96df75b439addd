// The values of a saved step against its record. Part of the door of `stream`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

struct VerifiedFile {
  std::string name;
  uint64_t bytes = 0;
  std::optional<Error> fault;  // the first one in this file
};
struct Verified {
  std::vector<VerifiedFile> files;
  uint64_t tensors_checked = 0;  // whose values have the recorded digests

  const Error* first_fault() const noexcept;
};
// Reads every byte of a step that open_step has found. A fault of a file is recorded, with the
// tensor, its first wrong element's chunk and both digests, and the next file is read. Holds 4 MiB.
// `poll` is called before each read; an exception from it ends the call. Throws what open_step
// throws.
Verified verify_step(FileSystem& files, const std::string& path, FunctionRef<void()> poll);

}  // namespace modicum
