#include "modicum/stream/reader.h"

#include <algorithm>

namespace modicum {
namespace {

constexpr uint64_t kWindowBytes = 8 * kMiB;

}  // namespace

DataReader::~DataReader() { leave(); }

void DataReader::open(uint32_t file) {
  if (file_ && file == file_index_) return;
  leave();
  file_ = open_data_file(checkpoint_, file);
  file_index_ = file;
}

void DataReader::leave() noexcept {
  if (!file_) return;
  drop(previous_);
  drop(current_);
  file_.reset();
  window_ = UINT64_MAX;
}

void DataReader::drop(Behind& behind) noexcept {
  if (behind.bytes > 0) {
    file_->drop_cached(behind.index * kWindowBytes, (behind.index + 1) * kWindowBytes);
    cached_ -= behind.bytes;
  }
  behind = {};
}

void DataReader::enter(uint64_t window) {
  if (window == window_) return;
  drop(previous_);
  previous_ = current_;
  current_ = {.index = window};
  window_ = window;
  const uint64_t size = checkpoint_.manifest.files[file_index_].identity.size_bytes;
  brought_in_ =
      !file_->is_cached(window * kWindowBytes, std::min((window + 1) * kWindowBytes, size));
}

void DataReader::read(uint32_t file, uint64_t begin, std::span<std::byte> into) {
  open(file);
  while (!into.empty()) {
    enter(begin / kWindowBytes);
    const size_t n = std::min<uint64_t>(into.size(), (window_ + 1) * kWindowBytes - begin);
    file_->read(into.first(n), begin);
    bytes_read_ += n;
    if (brought_in_) {
      current_.bytes += n;
      cached_ += n;
      cached_peak_ = std::max(cached_peak_, cached_);
    }
    begin += n;
    into = into.subspan(n);
  }
}

}  // namespace modicum
