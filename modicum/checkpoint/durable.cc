#include "modicum/checkpoint/durable.h"

#include <memory>
#include <span>

#include "modicum/base/base.h"

namespace modicum {

void write_durably(FileSystem& files, const std::string& path, const std::string& text) {
  const std::unique_ptr<File> file = files.create(path);
  file->write(std::as_bytes(std::span(text)), 0);
  file->sync();
  file->close();
}

void replace_durably(FileSystem& files, const Replacement& file, const std::string& text) {
  const std::string temporary = join_path(file.directory, file.temporary);
  if (files.exists(temporary)) files.remove(temporary);
  try {
    write_durably(files, temporary, text);
    files.rename(temporary, join_path(file.directory, file.name));
  } catch (const Error&) {
    if (files.exists(temporary)) files.remove(temporary);
    throw;
  }
  files.sync_directory(file.directory);
}

void remove_tree(FileSystem& files, const std::string& path) {
  if (files.is_directory(path)) {
    for (const std::string& name : files.list(path)) remove_tree(files, join_path(path, name));
  }
  files.remove(path);
}

}  // namespace modicum
