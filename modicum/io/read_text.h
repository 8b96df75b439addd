// Reads small files (/proc, /sys/fs/cgroup, recipes) in one piece and others in blocks, writes
// kernel files, checks that a file is unchanged, and queries the space of a file system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/io/file.h"

namespace modicum {

constexpr uint64_t kLongestKernelText = 16 * 1024 * 1024;

// The content of a file of /proc or /sys, whose size fstat does not report. nullopt if it can't be
// read (absent, not permitted, longer than kLongestKernelText).
std::optional<std::string> read_kernel_text(const std::string& path);
// Calls `line` with each line of such a file, of any length: smaps has about 700 bytes for each
// mapping. Returns false if the file can't be read to its end.
bool for_each_kernel_line(const std::string& path, FunctionRef<void(std::string_view)> line);
// Writes `text` to a kernel file with one write(2). Returns whether that succeeded.
bool write_kernel_text(const std::string& path, const std::string& text);

// The size of the file system that holds `path`, and its free space without the blocks reserved for
// root. nullopt if statvfs fails.
struct FileSystemSpace {
  uint64_t size_bytes = 0;
  uint64_t free_bytes = 0;
};
std::optional<FileSystemSpace> space_of(const std::string& path);

// The longest text of a checkpoint that is read, be it an index, a record or a journal: rule R21 of
// docs/reference/formats.md.
constexpr uint64_t kLongestText = 100'000'000;
// The content of a file of at most `most_bytes`. Throws `too_long` for a longer one, of which
// nothing is read; CONFLICT if the file changed during the read; and the errors of File::read.
std::string read_text(File& file, uint64_t most_bytes, Category too_long);
// Reads the first `bytes` bytes of a file of any size, and calls `fn` with one block of 16 KiB
// after the other, which is on the stack, and with its offset. Throws the errors of File::read.
void read_in_blocks(File& file, uint64_t bytes,
                    FunctionRef<void(std::span<const std::byte> block, uint64_t at)> fn);

// Throws CONFLICT, naming the file, unless its identity equals `before`, which was read earlier.
void require_unchanged(File& file, const FileIdentity& before);

}  // namespace modicum
