#include "modicum/io/blocked_call.h"

#include <fmt/format.h>
#include <sys/syscall.h>

#include <cstdlib>

#include "modicum/io/file.h"
#include "modicum/io/read_text.h"

namespace modicum {
namespace {

// The numbers in /proc/PID/task/TID/syscall: the call, then its arguments, of which pread and
// pwrite have (file, buffer, size, offset). The first number is decimal, the others are
// hexadecimal. The text of a thread on a CPU is "running".
struct Syscall {
  int64_t number = -1;
  uint64_t file = 0, offset = 0;
};

Syscall parse(const std::string& text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return {};
  char* at = nullptr;
  Syscall call{.number = std::strtoll(text.c_str(), &at, 10)};
  call.file = std::strtoull(at, &at, 16);
  for (int argument = 1; argument < 4; ++argument) call.offset = std::strtoull(at, &at, 16);
  return call;
}

}  // namespace

std::optional<BlockedCall> blocked_call(pid_t pid) {
  PosixFileSystem files;
  const std::string process = fmt::format("/proc/{}", pid);
  try {
    for (const std::string& thread : files.list(process + "/task")) {
      const std::string path = fmt::format("{}/task/{}/syscall", process, thread);
      const Syscall call = parse(read_kernel_text(path).value_or(""));
      const bool has_offset = call.number == SYS_pread64 || call.number == SYS_pwrite64;
      if (!has_offset && call.number != SYS_fsync && call.number != SYS_fdatasync) continue;
      BlockedCall blocked{
          base_name(files.link_target(fmt::format("{}/fd/{}", process, call.file)))};
      if (has_offset) blocked.offset = call.offset;
      return blocked;
    }
  } catch (const Error&) {  // the process or the thread has ended, or may not be inspected
  }
  return std::nullopt;
}

}  // namespace modicum
