// Compares the values in a saved checkpoint with the checkpoint's record. Part of the
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
struct Verification {
  std::vector<VerifiedFile> files;
  uint64_t tensors_checked = 0;  // tensors without a fault

  const Error* first_fault() const noexcept;
};
// If several callers share the reads, each makes every count-th read, from number `index` on.
struct VerifyPart {
  uint64_t index = 0;
  uint64_t count = 1;
};
// Reads every byte of the checkpoint that open_run_checkpoint finds at `path`, or this caller's
// part. First checks the digests of files (see CheckpointFile), then the values of tensors. Records
// the first fault of each file and goes on; a fault of a value has the tensor, the offset of the
// chunk and both digests. Holds 4 MiB. Calls `poll` before each read; `poll` may end the call by
// throwing CANCELLED or PREEMPTED. Throws the errors of open_run_checkpoint; and, unless a file has
// a fault, those of open_checkpoint that name no file of the record, and INTEGRITY if the files
// hold fewer tensors than the record lists, or if a tensor is in a file that the record does not
// list.
Verification verify_checkpoint(FileSystem& files, const std::string& path, FunctionRef<void()> poll,
                               const VerifyPart& part = {});
// The first error of verify_checkpoint that is damage (is_damage), recorded or thrown, found
// without the values of tensors if the digest of a file differs. If there is none, throws the first
// other error: a file that could not be read is not known to be damaged.
std::optional<Error> damage_of_checkpoint(FileSystem& files, const std::string& path,
                                          FunctionRef<void()> poll, const VerifyPart& part = {});

}  // namespace modicum
