// Writes data files in order, and has the kernel write them back behind the writer. Part of the
// door of `stream`.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "modicum/io/io.h"

namespace modicum {

// Writes the files of a save for one worker; at most one is open. Dirty pages that are left to the
// kernel make a save 3 to 6 times slower, and are charged to the cgroup. So after each kWindowBytes
// the writer starts to write the window back, waits for the one before, and drops it from the page
// cache:
//
//   window     0         1         2         3
//              dropped   dropped   started   being written
//
// Writes below kSmallBytes are runs of rows whose other columns belong to other ranks, which write
// to the same pages at about the same time. A page that was written back too early is written back
// again, and if it was dropped, it is read first: together 5 to 14 times slower. Windows of such
// writes are half as large, start one window later, and stay cached for two more:
//
//   window     0         1         2         3         4         5
//              dropped   cached    cached    started   full      being written
class DataWriter {
 public:
  static constexpr uint64_t kWindowBytes = 8 * kMiB;
  static constexpr uint64_t kSmallBytes = 64 * kKiB;
  DataWriter(FileSystem& files, const std::string& directory)
      : files_(files), directory_(directory) {}

  // The file must exist. NOSPACE, IO.
  void write(const std::string& name, uint64_t begin, std::span<const std::byte> bytes);
  // Call after the last write: makes the open file durable. NOSPACE, IO. `write` does the same when
  // it leaves a file.
  void finish();

  uint64_t bytes_written() const noexcept { return bytes_written_; }

 private:
  struct Window {
    uint64_t begin = UINT64_MAX, end = 0;
    uint64_t bytes = 0;  // written
    uint64_t small = 0;  // of these, in writes below kSmallBytes

    bool is_shared() const noexcept { return 2 * small >= bytes; }
  };
  void write_back();

  FileSystem& files_;
  const std::string& directory_;
  std::unique_ptr<File> file_;
  Window window_;               // being written
  std::deque<Window> written_;  // earlier ones that are not dropped, the latest first
  uint64_t bytes_written_ = 0;
};

}  // namespace modicum
