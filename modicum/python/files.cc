// Files in Python: text and records of others are read, and trees are removed, as C++ does it.
#include <nanobind/stl/filesystem.h>

#include <filesystem>
#include <string>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/io.h"
#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

using Path = std::filesystem::path;

Category category_named(const std::string& name) {
  for (int c = 0; c < static_cast<int>(Category::count); ++c) {
    if (category_name(static_cast<Category>(c)) == name) return static_cast<Category>(c);
  }
  fail(Category::usage, "unknown category", {.got = printable(name)});
}

nb::bytes read_file(const Path& path, const std::string& too_long, uint64_t most_bytes) {
  const Category category = category_named(too_long);
  const std::string text = without_the_lock([&] {
    PosixFileSystem files;
    return read_text(*files.open(path.string()), most_bytes, category);
  });
  return nb::bytes(text.data(), text.size());
}

}  // namespace

void define_files(nb::module_& module) {
  module.def(
      "read_file", read_file, "path"_a, nb::kw_only(), "too_long"_a = "INTEGRITY",
      "most_bytes"_a = kLongestText,
      "The bytes of a regular file. Raises IoError, also for a FIFO, without waiting for its "
      "other end; an error of category `too_long` for a file of more than `most_bytes`, of "
      "which nothing is read.");
  module.def(
      "is_uncached_name",
      [](const std::string& path) {
        PosixFileSystem files;
        return is_uncached_name(files, path);
      },
      "path"_a,
      "Whether `path` is `org/name` of a model that is not in the local Hugging Face cache, and "
      "nothing has this path.");
  module.def(
      "make_directory", [](const Path& path) { PosixFileSystem().make_directory(path); }, "path"_a,
      "Makes a directory. Raises IoError, also if a directory of the path is a symbolic link.");
  module.def(
      "write_file",
      [](const Path& path, const nb::bytes& data) {
        const std::span bytes(static_cast<const std::byte*>(data.data()), data.size());
        without_the_lock([&] {
          const std::unique_ptr<File> file = PosixFileSystem().create(path);
          file->write(bytes, 0);
          file->sync();
          file->close();
        });
      },
      "path"_a, "data"_a,
      "Writes and syncs a new file. Raises IoError, also if a directory of the path is a symbolic "
      "link.");
  module.def(
      "rename",
      [](const Path& from, const Path& to) {
        PosixFileSystem files;
        files.rename(with_real_parent(files, from), with_real_parent(files, to));
      },
      "from_path"_a, "to_path"_a, "Renames a file, a link or a directory. Raises IoError.");
  module.def(
      "remove_tree",
      [](const Path& path) {
        without_the_lock([&] {
          PosixFileSystem files;
          files.remove_tree(with_real_parent(files, path));
        });
      },
      "path"_a,
      "Removes a file, or a directory with everything in it. Removes links, and follows none. "
      "After a failure removes the rest, then raises IoError.");
}

}  // namespace modicum::python
