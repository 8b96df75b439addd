// Reading data files in order, with the page cache dropped behind.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// One worker's view of a checkpoint's data: at most one file is open. Page cache that its reads
// brought in is dropped in windows of 8 MiB (less, or unaligned, leaves large folios in the cache),
// kWindowsBehind of them behind the reader: ranks read neighbouring parts of a window at about the
// same time, and what is dropped too early is read twice. Windows that were wholly cached when the
// file was opened are left as they were; later the kernel's own reading ahead would look the same.
class DataReader {
 public:
  static constexpr size_t kWindowsBehind = 8;
  explicit DataReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  explicit DataReader(const Checkpoint&&) = delete;
  ~DataReader();
  DataReader(const DataReader&) = delete;
  DataReader& operator=(const DataReader&) = delete;

  void read(uint32_t file, uint64_t begin, std::span<std::byte> into);
  // After the last read: CONFLICT where the open file is no longer what was proven. Files that were
  // read before it have been compared when they were left. Without it, nothing read may be used.
  void finish();

  uint64_t bytes_read() const noexcept { return bytes_read_; }
  uint64_t page_cache_peak_bytes() const noexcept { return cached_peak_; }

 private:
  struct Behind {  // a window that this reader has brought in
    uint64_t index = 0;
    uint64_t bytes = 0;
  };

  void open(uint32_t file);
  void enter(uint64_t window);
  void drop_first() noexcept;
  void close() noexcept;

  const Checkpoint& checkpoint_;
  std::unique_ptr<File> file_;
  uint32_t file_index_ = 0;
  uint64_t window_ = UINT64_MAX;  // where the reader is
  std::vector<bool> was_cached_;  // by window
  std::deque<Behind> behind_;     // the last one is where the reader is
  uint64_t bytes_read_ = 0;
  uint64_t cached_ = 0;
  uint64_t cached_peak_ = 0;
};

}  // namespace modicum
