// Reads small files whole (/proc, /sys/fs/cgroup, recipes), checks that a file has not changed, and
// asks for the space on a file system.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "modicum/io/file.h"

namespace modicum {

constexpr uint64_t kLongestKernelText = 16 * 1024 * 1024;

// The content of a kernel file, whose size fstat does not report; nullopt if it can't be read
// (absent, not permitted, longer than the constant above).
std::optional<std::string> read_kernel_text(const std::string& path);
// Writes `text` to a kernel file with one write(2). Returns whether that succeeded.
bool write_kernel_text(const std::string& path, const std::string& text);

// Bytes of the file system that `path` is on: its size, and what an unprivileged process may still
// write. nullopt if that can't be read.
struct FileSystemSpace {
  uint64_t size_bytes = 0;
  uint64_t free_bytes = 0;
};
std::optional<FileSystemSpace> space_of(const std::string& path);

// The content of a small file. CONFLICT if it changed while it was read; errors of File::read.
std::string read_text(File& file);

// Throws CONFLICT, naming the file, unless its identity still equals `proven`.
void require_unchanged(File& file, const FileIdentity& proven);

}  // namespace modicum
