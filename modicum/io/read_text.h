// Small files whole (/proc, /sys/fs/cgroup, a recipe), and whether a file is still what it was.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "modicum/io/file.h"

namespace modicum {

constexpr uint64_t kLongestKernelText = 16 * 1024 * 1024;

// The content of a small file of the kernel's, or nothing where it can't be read (absent, not
// allowed, gone, longer than the constant above). For files whose size fstat doesn't know.
std::optional<std::string> read_kernel_text(const std::string& path);
// One write to a file of the kernel's. False where it isn't possible.
bool write_kernel_text(const std::string& path, const std::string& text);

// All of a file that is expected to be small. CONFLICT where it changed while it was read.
std::string read_text(File& file);

// CONFLICT, naming the file, where an open file is no longer what it was when `proven` was taken.
void require_unchanged(File& file, const FileIdentity& proven);

}  // namespace modicum
