#include "modicum/checkpoint/durable.h"

#include <fmt/format.h>

#include <memory>
#include <span>
#include <string_view>

#include "modicum/base/base.h"

namespace modicum {
namespace {

constexpr std::string_view kNotDurable =
    "a directory can't be synced here, so the result may not survive a power cut";

}  // namespace

void Publication::depend_on(bool is_name_durable) {
  if (is_name_durable || !is_durable) return;
  is_durable = false;
  warnings.emplace_back(kNotDurable);
}

void Publication::take_in(Publication other) {
  if (!other.is_durable && !is_durable) {  // both warn of it
    std::erase(other.warnings, kNotDurable);
  }
  is_durable &= other.is_durable;
  may_vanish |= other.may_vanish;
  for (std::string& warning : other.warnings) warnings.push_back(std::move(warning));
}

Publication make_durable_or_take_back(FunctionRef<bool()> make_durable,
                                      FunctionRef<void()> take_back) {
  try {
    Publication published;
    published.depend_on(make_durable());
    return published;
  } catch (const Error& error) {
    try {
      take_back();
    } catch (const Error&) {
      return {false,
              {fmt::format("the result is visible, but it may not survive a power cut: {}",
                           error.what())},
              true};
    }
    throw;
  }
}

namespace {

// Whether a rename from or to `path` of the directory that was `before` has brought it there, or
// taken it away, although it reported an error, as a server can whose reply is lost. False if that
// can't be told.
bool is_renamed(FileSystem& files, const std::string& path,
                const std::optional<DirectoryEntry>& before, bool is_there) {
  if (!before) return false;
  try {
    const std::optional<DirectoryEntry> entry = files.entry(path);
    const bool is_it = entry && entry->device == before->device && entry->inode == before->inode;
    return is_it == is_there;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

Publication publish_directory(FileSystem& files, const std::string& from, const std::string& to) {
  const std::optional<DirectoryEntry> before = files.entry(from);
  try {
    files.rename_new(from, to);
  } catch (const Error&) {
    if (!is_renamed(files, to, before, true)) throw;
  }
  const auto take_back = [&] {
    try {
      files.rename_new(to, from);
    } catch (const Error&) {
      if (!is_renamed(files, to, before, false)) throw;
    }
  };
  return make_durable_or_take_back([&] { return files.sync_directory(parent_path(to)); },
                                   take_back);
}

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

void replace(FileSystem& files, const Replacement& file, const std::string& text) {
  const std::string temporary = join_path(file.directory, file.temporary);
  if (files.exists(temporary)) files.remove(temporary);
  try {
    write_durably(files, temporary, text);
    files.rename(temporary, join_path(file.directory, file.name));
  } catch (const Error&) {
    if (files.exists(temporary)) files.remove(temporary);
    throw;
  }
}

bool replace_durably(FileSystem& files, const Replacement& file, const std::string& text) {
  replace(files, file, text);
  return files.sync_directory(file.directory);
}

bool ensure_directory(FileSystem& files, const std::string& path) {
  if (files.is_directory(path)) return false;
  try {
    files.make_directory(path);
  } catch (const Error& error) {
    if (error.category() != Category::conflict || !files.is_directory(path)) throw;
  }
  return true;
}

}  // namespace modicum
