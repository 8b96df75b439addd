// Small files whole: /proc, /sys/fs/cgroup, a recipe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace modicum {

constexpr uint64_t kLongestKernelText = 16 * 1024 * 1024;

// The content of a small file of the kernel's, or nothing where it can't be read (absent, not
// allowed, gone, longer than the constant above). For files whose size fstat doesn't know.
std::optional<std::string> read_kernel_text(const std::string& path);
// One write to a file of the kernel's. False where it isn't possible.
bool write_kernel_text(const std::string& path, const std::string& text);

}  // namespace modicum
