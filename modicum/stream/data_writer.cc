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
  window_ = {std::min(window_.begin, begin), std::max(window_.end, begin + bytes.size())};
  in_window_ += bytes.size();
  if (in_window_ < kWindowBytes) return;
  file_->start_writeback(window_.begin, window_.end);
  if (before_.end > 0) file_->finish_writeback(before_.begin, before_.end);
  before_ = window_;
  window_ = {};
  in_window_ = 0;
}

void DataWriter::finish() {
  if (!file_) return;
  const std::unique_ptr<File> file = std::move(file_);
  file->sync();
  for (const Span& span : {before_, window_}) {
    if (span.end > 0) file->drop_cached(span.begin, span.end);
  }
  before_ = window_ = {};
  in_window_ = 0;
  file->close();
}

}  // namespace modicum
