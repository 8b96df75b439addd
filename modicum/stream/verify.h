// Compares the values in a step (a saved checkpoint directory) with the step's record. Part of the
// public header of `stream`.
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
  uint64_t tensors_checked = 0;  // tensors whose digests equal the recorded ones

  const Error* first_fault() const noexcept;
};
// Reads every byte of the step that open_step finds at `path`. First checks the digests of files;
// if all are right, checks the values of tensors. Records the first fault of each file and goes on;
// a fault of a value has the tensor, the offset of the chunk and both digests. Holds 4 MiB. Calls
// `poll` before each read; an exception from it ends the call. Several callers can share the reads
// by `part`: caller number `index` of `count`. Throws the errors of open_step and open_checkpoint;
// INTEGRITY if the record and the files do not list the same files and tensors.
struct VerifyPart {
  uint64_t index = 0;
  uint64_t count = 1;
};
Verified verify_step(FileSystem& files, const std::string& path, FunctionRef<void()> poll,
                     const VerifyPart& part = {});

}  // namespace modicum
