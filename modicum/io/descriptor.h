// An owned file descriptor, and a wrapper that repeats interrupted system calls.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace modicum {

// Repeats a system call while it fails with EINTR.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  // open(2) with O_CLOEXEC. On failure the result is not valid and errno is set.
  static Descriptor open(const char* path, int flags, mode_t mode = 0) noexcept {
    return Descriptor(uninterrupted([&] { return ::open(path, flags | O_CLOEXEC, mode); }));
  }

  bool is_valid() const noexcept { return fd_ >= 0; }
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

}  // namespace modicum
