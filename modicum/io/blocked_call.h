// Which file another process waits for.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace modicum {

// A system call on a file in which a thread is.
struct BlockedCall {
  std::string file;                // base name
  std::optional<uint64_t> offset;  // of pread and pwrite, where the call began
};
// The call of the first thread of process `pid` that is in pread, pwrite, fsync or fdatasync.
// nullopt if none is, or if the kernel does not tell.
std::optional<BlockedCall> blocked_call(pid_t pid);

}  // namespace modicum
