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

namespace {

// Copies the first `bytes` bytes. Returns their digest; nullopt if `from` has become shorter.
std::optional<Digest> copy_bytes(File& from, uint64_t bytes, File& to) {
  Hasher hasher;
  hasher.add(bytes);
  try {
    read_in_blocks(from, bytes, [&](std::span<const std::byte> block, uint64_t at) {
      hasher.add_part(block);
      to.write(block, at);
    });
  } catch (const Error& error) {
    if (error.category() != Category::format_trunc) throw;
    return std::nullopt;
  }
  return hasher.digest();
}

}  // namespace

std::optional<CopiedFile> copy_durably(File& from, FileSystem& files, const std::string& path) {
  const FileIdentity before = from.identity();
  const std::unique_ptr<File> file = files.create(path);
  const std::optional<Digest> digest = copy_bytes(from, before.size_bytes, *file);
  const bool is_whole = digest && from.identity() == before;
  if (is_whole) file->sync();
  file->close();
  if (is_whole) return CopiedFile{before.size_bytes, *digest};
  files.remove(path);
  return std::nullopt;
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

}  // namespace modicum
