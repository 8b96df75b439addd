#include "modicum/cli/result_file.h"

#include <fmt/format.h>
#include <unistd.h>

namespace modicum {
namespace {

Replacement place_of(FileSystem& files, const std::string& path) {
  const std::string name = base_name(path);
  const size_t end = path.find_last_of('/');
  const std::string directory = end == std::string::npos ? "." : path.substr(0, end + 1);
  return {real_directory(files, directory), name, fmt::format(".{}.{}.part", name, getpid())};
}

}  // namespace

ResultFile::ResultFile(FileSystem& files, std::string_view flag, const std::string& path)
    : files_(files), stream_(OutputStream::open(path)), place_(place_of(files, path)) {
  if (stream_) return;
  if (files_.is_directory(path)) {
    fail(Category::io, fmt::format("{} names a directory", flag), {.file = place_.name});
  }
  if (files_.exists(path)) {
    // `write` would replace the link, not the file to which it points.
    if (!files_.link_target(path).empty()) {
      fail(Category::io, fmt::format("{} names a symbolic link", flag), {.file = place_.name});
    }
    files_.open_to_write(join_path(place_.directory, place_.name))->close();
  }
  const std::string temporary = join_path(place_.directory, place_.temporary);
  files_.create(temporary)->close();
  files_.remove(temporary);
}

void ResultFile::write(const std::string& text) {
  if (stream_) {
    stream_->write(text);
  } else {
    replace_durably(files_, place_, text);
  }
}

}  // namespace modicum
