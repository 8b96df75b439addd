// Reads small files whole (/proc, /sys/fs/cgroup, recipes), and checks that a file has not changed.
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

// The content of a small file. CONFLICT if it changed while it was read; errors of File::read.
std::string read_text(File& file);

// Throws CONFLICT, naming the file, unless its identity still equals `proven`.
void require_unchanged(File& file, const FileIdentity& proven);

}  // namespace modicum
