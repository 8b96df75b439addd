#include "modicum/stream/data_writer.h"

#include <algorithm>

namespace modicum {

void DataWriter::write(const std::string& name, uint64_t begin, std::span<const std::byte> bytes) {
  if (!file_ || file_->name() != name) {
    finish();
    file_ = files_.open_to_write(join_path(directory_, name));
  }
  file_->write(bytes, begin);
  bytes_written_ += bytes.size();
  window_.begin = std::min(window_.begin, begin);
  window_.end = std::max(window_.end, begin + bytes.size());
  window_.bytes += bytes.size();
  if (bytes.size() < kSmallBytes) window_.small += bytes.size();
  if (window_.bytes >= kWindowBytes / (window_.is_shared() ? 2 : 1)) write_back();
}

void DataWriter::write_back() {
  // For shared windows, write-back starts `delay` windows later, and written pages stay cached for
  // `stay` more windows.
  const size_t delay = window_.is_shared() ? 1 : 0, stay = window_.is_shared() ? 2 : 0;
  written_.push_front(window_);
  window_ = {};
  if (written_.size() > delay) {
    file_->start_writeback(written_[delay].begin, written_[delay].end);
  }
  if (written_.size() > delay + 1) {
    file_->finish_writeback(written_[delay + 1].begin, written_[delay + 1].end);
  }
  for (; written_.size() > delay + 1 + stay; written_.pop_back()) {
    file_->drop_cached(written_.back().begin, written_.back().end);
  }
}

void DataWriter::finish() {
  if (!file_) return;
  const std::unique_ptr<File> file = std::move(file_);
  file->sync();
  written_.push_front(window_);
  for (const Window& window : written_) {
    if (window.end > 0) file->drop_cached(window.begin, window.end);
  }
  written_.clear();
  window_ = {};
  file->close();
}

}  // namespace modicum
