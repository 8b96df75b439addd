#include "modicum/stream/reader.h"

#include <algorithm>

namespace modicum {
namespace {

constexpr uint64_t kWindowBytes = 8 * kMiB;

}  // namespace

DataReader::~DataReader() { close(); }

void DataReader::leave_for(uint32_t file) {
  if (!file_ || file != file_index_) finish();
}

void DataReader::open(uint32_t file) {
  if (file_ && file == file_index_) return;
  finish();
  file_ = open_data_file(checkpoint_, file);
  file_index_ = file;
  const uint64_t size = checkpoint_.manifest.files[file].identity.size_bytes;
  was_cached_.clear();
  for (uint64_t begin = 0; begin < size; begin += kWindowBytes) {
    const uint64_t bytes = std::min(kWindowBytes, size - begin);
    was_cached_.push_back(file_->cached_bytes(begin, begin + bytes) == bytes);
  }
}

void DataReader::finish() {
  if (file_) require_unchanged(*file_, checkpoint_.manifest.files[file_index_].identity);
  close();
}

void DataReader::close() noexcept {
  if (!file_) return;
  while (!behind_.empty()) drop_first();
  file_.reset();
  window_ = UINT64_MAX;
}

void DataReader::drop_first() noexcept {
  const EnteredWindow& behind = behind_.front();
  if (!was_cached_[behind.index]) {
    file_->drop_cached(behind.index * kWindowBytes, (behind.index + 1) * kWindowBytes);
    cached_ -= behind.bytes;
  }
  behind_.pop_front();
}

void DataReader::enter(uint64_t window) {
  if (window == window_) return;
  if (behind_.size() > options_.windows_behind) drop_first();
  behind_.push_back({.index = window});
  window_ = window;
}

bool DataReader::reads_around(uint64_t begin, std::span<std::byte> out) noexcept {
  if (options_.room.empty()) return false;
  const std::optional<uint64_t> cached = file_->cached_bytes(begin, begin + out.size());
  return cached && *cached < out.size() / 2 && file_->read_around(out, begin, options_.room);
}

void DataReader::read(uint32_t file, uint64_t begin, std::span<std::byte> out, bool once) {
  open(file);
  const bool around = once && reads_around(begin, out);
  const uint64_t end = begin + out.size();
  // Old windows are dropped before the read fills new ones, so that the peak stays bounded.
  for (uint64_t at = begin; at < end; at = (window_ + 1) * kWindowBytes) {
    enter(at / kWindowBytes);
    if (around || was_cached_[window_]) continue;
    const uint64_t n = std::min(end, (window_ + 1) * kWindowBytes) - at;
    behind_.back().bytes += n;
    cached_ += n;
    cached_peak_ = std::max(cached_peak_, cached_);
  }
  if (!around) file_->read(out, begin);
  bytes_read_ += out.size();
}

}  // namespace modicum
