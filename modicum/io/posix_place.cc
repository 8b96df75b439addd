#include "modicum/io/posix_place.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <utility>

#include "modicum/io/errno_error.h"
#include "modicum/io/file.h"

namespace modicum {
namespace {

// O_PATH, since a directory on the way may be searched but not read.
constexpr int kPathFlags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

Descriptor open_below(int directory, const std::string& name) {
  return Descriptor(uninterrupted([&] { return ::openat(directory, name.c_str(), kPathFlags); }));
}

bool is_link_at(int directory, const std::string& name) {
  struct stat status {};
  return ::fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISLNK(status.st_mode);
}

}  // namespace

std::optional<Place> find_place(const std::string& path, std::string_view what_failed) {
  const std::string parent = parent_path(path);
  std::optional<Descriptor> at(Descriptor::open(parent[0] == '/' ? "/" : ".", kPathFlags));
  if (!at->is_valid()) fail_errno(errno, what_failed, about(path));
  for (size_t begin = 0; begin < parent.size();) {
    const size_t end = std::min(parent.find('/', begin), parent.size());
    const std::string name = parent.substr(begin, end - begin);
    begin = end + 1;
    if (name.empty()) continue;
    Descriptor next = open_below(at->get(), name);
    if (!next.is_valid()) {
      const int error = errno;
      if (error == ENOENT) return std::nullopt;
      if (is_link_at(at->get(), name)) {
        fail(Category::conflict,
             fmt::format("{}: a directory of its path is a symbolic link", what_failed),
             {.file = name});
      }
      fail_errno(error, what_failed, about(path));
    }
    at.emplace(std::move(next));
  }
  return Place{std::move(*at), base_name(path)};
}

Place open_place(const std::string& path, std::string_view what_failed) {
  std::optional<Place> found = find_place(path, what_failed);
  if (!found) fail_errno(ENOENT, what_failed, about(path));
  return std::move(*found);
}

}  // namespace modicum
