// Lists directories, and removes them with everything in them.
#include <dirent.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "modicum/io/descriptor.h"
#include "modicum/io/errno_error.h"
#include "modicum/io/file.h"
#include "modicum/io/posix_place.h"

namespace modicum {
namespace {

struct CloseStream {
  void operator()(DIR* open) const noexcept { ::closedir(open); }
};
using Stream = std::unique_ptr<DIR, CloseStream>;

// The names in a directory. Returns false, with errno, on failure.
bool read_names(DIR* stream, std::vector<std::string>& names) {
  while (true) {
    errno = 0;
    const dirent* const entry = ::readdir(stream);
    if (entry == nullptr) return errno == 0;
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(std::move(name));
  }
}

Descriptor open_directory(int parent, const std::string& name) {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  return Descriptor(uninterrupted([&] { return ::openat(parent, name.c_str(), kFlags); }));
}

int unlink_at(int parent, const std::string& name, int flags) {
  return uninterrupted([&] { return ::unlinkat(parent, name.c_str(), flags); });
}

// Removes the entries of the directory `top`. Each directory below is first renamed into `top`, so
// two descriptors and no recursion suffice for trees of any depth, and the rename fails for the
// mount point of another file system. The kernel removes a name only if it is no directory, and
// opens it only if it is one and no link, so another process may exchange them at any time.
class TreeRemoval {
 public:
  explicit TreeRemoval(int top) : top_(top) {}

  // `name`: the top's, for errors. Throws the first error.
  void run(const std::string& name) {
    empty(top_, name);
    while (!moved_.empty()) {
      const MovedEntry next = std::move(moved_.back());
      moved_.pop_back();
      const Descriptor directory = open_directory(top_, next.now);
      if (directory.is_valid()) {
        empty(directory.get(), next.was);
        if (unlink_at(top_, next.now, AT_REMOVEDIR) != 0) keep_error(next.was);
      } else if (errno != ENOTDIR && errno != ELOOP) {
        keep_error(next.was);
      } else if (unlink_at(top_, next.now, 0) != 0) {
        keep_error(next.was);
      }
    }
    if (error_ != 0) fail_errno(error_, "cannot remove", {.file = failed_});
  }

 private:
  struct MovedEntry {
    std::string was, now;  // base names
  };

  void empty(int directory, const std::string& name) {
    // A descriptor of its own, since the stream closes the one it has.
    Descriptor copy(::fcntl(directory, F_DUPFD_CLOEXEC, 0));
    const Stream stream(copy.is_valid() ? ::fdopendir(copy.get()) : nullptr);
    if (!stream) return keep_error(name);
    copy.release();
    std::vector<std::string> names;
    if (!read_names(stream.get(), names)) keep_error(name);
    for (const std::string& entry : names) remove(directory, entry);
  }

  void remove(int directory, const std::string& name) {
    if (unlink_at(directory, name, 0) == 0) return;
    if (errno != EISDIR) return keep_error(name);
    if (unlink_at(directory, name, AT_REMOVEDIR) == 0) return;
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR) return move(directory, name);
    keep_error(name);
  }

  void move(int directory, const std::string& name) {
    while (true) {
      const std::string to = fmt::format(".{}", next_++);
      if (::renameat(directory, name.c_str(), top_, to.c_str()) == 0) {
        return moved_.push_back({name, to});
      }
      const bool is_taken =
          errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR || errno == EISDIR;
      if (!is_taken) return keep_error(name);
    }
  }

  // Of errno. Another process may have removed the name.
  void keep_error(const std::string& name) {
    if (error_ != 0 || errno == ENOENT) return;
    error_ = errno;
    failed_ = name;
  }

  const int top_;
  std::vector<MovedEntry> moved_;  // into `top_`
  uint64_t next_ = 0;
  int error_ = 0;  // the first one
  std::string failed_;
};

void remove_entries(const Place& place) {
  const Descriptor directory = open_directory(place.directory.get(), place.name);
  if (!directory.is_valid()) fail_errno(errno, "cannot open the directory", about(place.name));
  TreeRemoval(directory.get()).run(place.name);
}

}  // namespace

std::vector<std::string> PosixFileSystem::list(const std::string& directory) {
  const Stream stream(::opendir(directory.c_str()));
  std::vector<std::string> names;
  if (!stream || !read_names(stream.get(), names)) {
    fail_errno(errno, "cannot list the directory", about(directory));
  }
  std::sort(names.begin(), names.end());
  return names;
}

void PosixFileSystem::remove_tree(const std::string& path) {
  const std::optional<Place> place = find_place(path, "cannot remove");
  if (!place) return;
  const int parent = place->directory.get();
  if (unlink_at(parent, place->name, 0) == 0 || errno == ENOENT) return;
  if (errno != EISDIR) fail_errno(errno, "cannot remove", about(path));
  remove_entries(*place);
  if (unlink_at(parent, place->name, AT_REMOVEDIR) == 0 || errno == ENOENT) return;
  fail_errno(errno, "cannot remove", about(path));
}

void PosixFileSystem::empty_directory(const std::string& path) {
  remove_entries(open_place(path, "cannot open the directory"));
}

}  // namespace modicum
