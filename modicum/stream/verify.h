// Compares the values of a saved step with its record. Part of the door of `stream`.
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
  uint64_t tensors_checked = 0;  // with values of the recorded digests

  const Error* first_fault() const noexcept;
};
// Reads every byte of the step that open_step finds at `path`. Records the first fault of each
// file, with the tensor, the chunk of the first wrong element and both digests, and goes on with
// the next file. Holds 4 MiB. `poll` is called before each read; an exception from it ends the
// call. `part`: of several callers, each reads its share of the files and chunks. Errors as those
// of open_step.
struct VerifyPart {
  uint64_t index = 0;
  uint64_t count = 1;
};
Verified verify_step(FileSystem& files, const std::string& path, FunctionRef<void()> poll,
                     const VerifyPart& part = {});

}  // namespace modicum
