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

// The number of the descriptor that a path names.
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

// Without waiting for the reader of a FIFO.
Descriptor opened(const std::string& path) {
  if (const auto fd = descriptor_in(path)) {
    return Descriptor(fcntl(*fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  }
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
  const int mode = fcntl(descriptor.get(), F_GETFL);
  if (mode < 0) fail_errno(errno, "cannot open", {.file = name});
  if ((mode & O_ACCMODE) == O_RDONLY) fail_errno(EBADF, "cannot write", {.file = name});
  return OutputStream(std::move(descriptor), std::move(name));
}

void OutputStream::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::write(descriptor_.get(), text.data(), text.size()); });
    if (written < 0 && errno == EAGAIN) {
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
