// Writes data files one after the other, and starts their write-back early. Part of the public
// header of `stream`.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "modicum/io/io.h"

namespace modicum {

// Writes the files of a save for one worker; at most one file is open. A save is 3 to 6 times
// slower if the kernel decides when to write dirty pages back, and the memory cgroup is charged for
// them. So the writer divides its writes into windows of kWindowBytes. At the end of a window it
// starts the write-back of the window's pages, waits for the write-back of the window before, and
// drops that earlier window from the page cache:
//
//   window     0         1         2         3
//              dropped   dropped   started   filling
//
// Writes below kSmallBytes are parts of rows whose other columns belong to other ranks, which write
// to the same pages at about the same time. A page that is written back too early must be written
// back twice, and also read again if it was dropped: together, this makes a save 5 to 14 times
// slower. So if at least half of a window's bytes are in small writes, the window ends after
// kWindowBytes / 2, its write-back starts one window later ("pending"), and its pages stay cached
// for two more windows after they are on the disk ("written"):
//
//   window     0         1         2         3         4         5
//              dropped   written   written   started   pending   filling
class DataWriter {
 public:
  static constexpr uint64_t kWindowBytes = 8 * kMiB;
  static constexpr uint64_t kSmallBytes = 64 * kKiB;
  // Both arguments must outlive the writer.
  DataWriter(FileSystem& files, const std::string& directory)
      : files_(files), directory_(directory) {}

  // Writes to existing file `name` of the directory, from file offset `begin` on. Calls `finish`
  // first if another file is open. Throws NOSPACE or IO.
  void write(const std::string& name, uint64_t begin, std::span<const std::byte> bytes);
  // Call after the last write: makes the open file durable and closes it. Throws NOSPACE or IO.
  void finish();

  uint64_t bytes_written() const noexcept { return bytes_written_; }

 private:
  struct Window {
    uint64_t begin = UINT64_MAX, end = 0;  // smallest file range that contains its writes
    uint64_t bytes = 0;                    // sum over its writes
    uint64_t small = 0;                    // sum over its writes below kSmallBytes

    // Whether other ranks probably write to the same pages.
    bool is_shared() const noexcept { return 2 * small >= bytes; }
  };
  void write_back();

  FileSystem& files_;
  const std::string& directory_;
  std::unique_ptr<File> file_;
  Window window_;               // filling
  std::deque<Window> written_;  // earlier windows that are still cached, the latest first
  uint64_t bytes_written_ = 0;
};

}  // namespace modicum
