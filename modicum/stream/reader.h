// Reads data files and drops their pages from the page cache soon after. Part of the public header
// of `stream`.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// Reads a checkpoint's data for one worker; at most one file is open. Drops the page cache that its
// reads fill, in aligned windows of 8 MiB, since the kernel keeps a large folio if only a part of
// it is to be dropped. Several ranks read neighbouring parts of a window at about the same time,
// and a window that is dropped too early is read twice. So the last Options::windows_behind windows
// before the current one are kept:
//
//   window    0        1        2       ...      8        9
//             dropped  kept     kept    ...      kept     being read
//
// A window that was completely cached before the file was opened stays cached. This is probed when
// the file is opened, since later the kernel's read-ahead may have cached it.
//
// With Options::room, bytes that no other rank of the node needs are read around the page cache,
// unless half of them or more are cached, or File::read_around fails.
class DataReader {
 public:
  static constexpr size_t kWindowsBehind = 8;
  static constexpr size_t kWindowsBehindAlone = 1;  // no other rank of the node reads the files
  struct Options {
    size_t windows_behind = kWindowsBehind;
    std::span<std::byte> room;  // for File::read_around; empty: no read is around the page cache
  };
  explicit DataReader(const Checkpoint& checkpoint) : DataReader(checkpoint, Options{}) {}
  DataReader(const Checkpoint& checkpoint, const Options& options)
      : checkpoint_(checkpoint), options_(options) {}
  explicit DataReader(const Checkpoint&&) = delete;
  DataReader(const Checkpoint&&, const Options&) = delete;
  ~DataReader();
  DataReader(const DataReader&) = delete;
  DataReader& operator=(const DataReader&) = delete;

  // Fills `out` from file offset `begin` on. `once`: no other rank of the node needs these bytes.
  // Calls `finish` first if another file is open. Throws IO, FORMAT.TRUNC or CONFLICT.
  void read(uint32_t file, uint64_t begin, std::span<std::byte> out, bool once = false);
  // Calls `finish` if a file other than `file` is open.
  void leave_for(uint32_t file);
  // Call after the last read: closes the open file. Throws CONFLICT if it has changed since its
  // header was validated. Data of earlier reads are valid only once this has returned.
  void finish();

  uint64_t bytes_read() const noexcept { return bytes_read_; }
  // The most bytes of its own reads that were in the page cache at once.
  uint64_t page_cache_peak_bytes() const noexcept { return cached_peak_; }

 private:
  struct EnteredWindow {  // a window that this reader has entered
    uint64_t index = 0;
    uint64_t bytes = 0;  // of the reads that filled the page cache
  };

  bool reads_around(uint64_t begin, std::span<std::byte> out) noexcept;
  void open(uint32_t file);
  void enter(uint64_t window);
  void drop_first() noexcept;
  void close() noexcept;

  const Checkpoint& checkpoint_;
  const Options options_;
  std::unique_ptr<File> file_;
  uint32_t file_index_ = 0;
  uint64_t window_ = UINT64_MAX;      // the current window
  std::vector<bool> was_cached_;      // by window: completely cached at open
  std::deque<EnteredWindow> behind_;  // the current window last
  uint64_t bytes_read_ = 0;
  uint64_t cached_ = 0;  // sum of behind_[i].bytes
  uint64_t cached_peak_ = 0;
};

}  // namespace modicum
