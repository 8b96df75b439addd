// Reading data files in order, with the page cache dropped behind.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// One worker's view of a checkpoint's data: at most one file is open. Page cache that its reads
// brought in is dropped one window of 8 MiB behind the reader (less, or unaligned, leaves large
// folios in the cache); windows that were wholly cached before are left as they were.
class DataReader {
 public:
  explicit DataReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  ~DataReader();
  DataReader(const DataReader&) = delete;
  DataReader& operator=(const DataReader&) = delete;

  void read(uint32_t file, uint64_t begin, std::span<std::byte> into);

  uint64_t bytes_read() const noexcept { return bytes_read_; }
  uint64_t page_cache_peak_bytes() const noexcept { return cached_peak_; }

 private:
  struct Behind {  // a window that this reader has brought in
    uint64_t index = 0;
    uint64_t bytes = 0;
  };

  void open(uint32_t file);
  void enter(uint64_t window);
  void drop(Behind& behind) noexcept;
  void leave() noexcept;

  const Checkpoint& checkpoint_;
  std::unique_ptr<File> file_;
  uint32_t file_index_ = 0;
  uint64_t window_ = UINT64_MAX;  // where the reader is
  bool brought_in_ = false;       // whether that window is ours to drop
  Behind current_, previous_;
  uint64_t bytes_read_ = 0;
  uint64_t cached_ = 0;
  uint64_t cached_peak_ = 0;
};

}  // namespace modicum
