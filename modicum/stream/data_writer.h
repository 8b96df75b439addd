// Writes data files in order, and has the kernel write them back behind the writer. Part of the
// door of `stream`.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "modicum/io/io.h"

namespace modicum {

// Writes the files of a save for one worker; at most one is open. Dirty pages that are left to the
// kernel make a save 3 to 6 times slower, and are charged to the cgroup. So after each kWindowBytes
// the writer starts to write the window back, and waits for the one before:
//
//   window     0         1         2         3
//              on disk   on disk   started   being written
class DataWriter {
 public:
  static constexpr uint64_t kWindowBytes = 8 * kMiB;
  DataWriter(FileSystem& files, const std::string& directory)
      : files_(files), directory_(directory) {}

  // The file must exist. NOSPACE, IO.
  void write(const std::string& name, uint64_t begin, std::span<const std::byte> bytes);
  // Call after the last write: makes the open file durable. NOSPACE, IO. `write` does the same when
  // it leaves a file.
  void finish();

  uint64_t bytes_written() const noexcept { return bytes_written_; }

 private:
  struct Span {
    uint64_t begin = UINT64_MAX, end = 0;
  };

  FileSystem& files_;
  const std::string& directory_;
  std::unique_ptr<File> file_;
  Span before_, window_;    // the range of the last window and of this one
  uint64_t in_window_ = 0;  // bytes
  uint64_t bytes_written_ = 0;
};

}  // namespace modicum
