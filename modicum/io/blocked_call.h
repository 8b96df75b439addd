// Which file another process waits for.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace modicum {

// A system call on a file that has not returned yet.
struct BlockedCall {
  std::string file;                // base name
  std::optional<uint64_t> offset;  // of pread and pwrite; empty for other calls
};
// The call of the first thread of process `pid` that is in pread, pwrite, fsync or fdatasync.
// nullopt if no thread is in such a call, or if this process may not inspect `pid`.
std::optional<BlockedCall> blocked_call(pid_t pid);

}  // namespace modicum
