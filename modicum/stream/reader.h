// Reads data files in order and drops their page cache behind the reader. Part of the door of
// `stream`.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// The data of a checkpoint for one worker; at most one file is open. The page cache that its reads
// fill is dropped in aligned windows of 8 MiB (smaller or unaligned ranges leave large folios
// cached). Several ranks read neighbouring parts of a window at about the same time, and a window
// dropped too early is read twice, so kWindowsBehind windows are kept:
//
//   window    0        1        2       ...      8        9
//             dropped  kept     kept    ...      kept     being read
//
// Windows that were wholly cached when the file was opened stay cached. That is probed at open,
// since later they can't be told from the kernel's read-ahead.
class DataReader {
 public:
  static constexpr size_t kWindowsBehind = 8;
  explicit DataReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  explicit DataReader(const Checkpoint&&) = delete;
  ~DataReader();
  DataReader(const DataReader&) = delete;
  DataReader& operator=(const DataReader&) = delete;

  // IO, FORMAT.TRUNC. If `file` is not the open file, the open one is closed; CONFLICT if it has
  // changed.
  void read(uint32_t file, uint64_t begin, std::span<std::byte> into);
  // Call after the last read: CONFLICT if the open file has changed since its header was validated.
  // Nothing that was read may be used until it returns.
  void finish();

  uint64_t bytes_read() const noexcept { return bytes_read_; }
  uint64_t page_cache_peak_bytes() const noexcept { return cached_peak_; }

 private:
  struct Behind {  // a window that this reader has entered
    uint64_t index = 0;
    uint64_t bytes = 0;  // that its reads brought into the page cache
  };

  void open(uint32_t file);
  void enter(uint64_t window);
  void drop_first() noexcept;
  void close() noexcept;

  const Checkpoint& checkpoint_;
  std::unique_ptr<File> file_;
  uint32_t file_index_ = 0;
  uint64_t window_ = UINT64_MAX;  // the current window
  std::vector<bool> was_cached_;  // by window
  std::deque<Behind> behind_;     // the current window last
  uint64_t bytes_read_ = 0;
  uint64_t cached_ = 0;
  uint64_t cached_peak_ = 0;
};

}  // namespace modicum
