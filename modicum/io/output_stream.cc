#include "modicum/io/output_stream.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "modicum/io/errno_error.h"
#include "modicum/io/file.h"

namespace modicum {
namespace {

// The number of the descriptor that the path names, such as 5 for /dev/fd/5.
std::optional<int> descriptor_in(std::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    if (!path.starts_with(folder)) continue;
    const std::string_view digits = path.substr(folder.size());
    int fd = -1;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), fd);
    if (error == std::errc() && end == digits.end() && fd >= 0) return fd;
  }
  return std::nullopt;
}

// Duplicates a descriptor, since opening its path anew would start at offset 0 of a redirected
// file. On failure the result is not valid and errno is set.
Descriptor opened(const std::string& path) {
  if (const auto fd = descriptor_in(path)) {
    // Above 2: if a standard stream is closed, the duplicate would take its number, and so receive
    // what other code prints.
    return Descriptor(fcntl(*fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  }
  // O_NONBLOCK: a FIFO without a reader fails immediately. O_NOCTTY: a terminal does not become the
  // controlling terminal of this process.
  return Descriptor::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY);
}

}  // namespace

bool OutputStream::is_at(const std::string& path) {
  struct stat status {};
  if (descriptor_in(path)) return true;
  return stat(path.c_str(), &status) == 0 && (S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode));
}

std::optional<OutputStream> OutputStream::open(const std::string& path) {
  if (!is_at(path)) return std::nullopt;
  std::string name = base_name(path);
  Descriptor descriptor = opened(path);
  if (!descriptor.is_valid()) fail_errno(errno, "cannot open", {.file = name});
  const int mode = fcntl(descriptor.get(), F_GETFL);
  if (mode < 0) fail_errno(errno, "cannot open", {.file = name});
  if ((mode & O_ACCMODE) == O_RDONLY) {
    fail(Category::io, "the descriptor is not open for writing", {.file = name});
  }
  return OutputStream(std::move(descriptor), std::move(name));
}

void OutputStream::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::write(descriptor_.get(), text.data(), text.size()); });
    if (written < 0 && errno == EAGAIN) {
      // The result is ignored, since the next write reports any error.
      pollfd writable{descriptor_.get(), POLLOUT, 0};
      poll(&writable, 1, -1);
    } else if (written < 0) {
      fail_errno(errno, "cannot write", {.file = name_});
    } else {
      text.remove_prefix(static_cast<size_t>(written));
    }
  }
}

}  // namespace modicum
