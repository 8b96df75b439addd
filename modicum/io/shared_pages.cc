#include "modicum/io/shared_pages.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "modicum/io/descriptor.h"
#include "modicum/io/errno_error.h"

namespace modicum {
namespace {

// Maps the memory of a descriptor. The result is empty on failure.
std::span<std::byte> mapped(int fd, uint64_t bytes) noexcept {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return {};
  return {static_cast<std::byte*>(at), bytes};
}

// A POSIX record lock on the byte whose offset is the process id. It belongs to the process that
// sets it, and the kernel releases it when that process closes the descriptor, as exec does.
struct flock lock_of(pid_t pid) noexcept {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = pid;
  lock.l_len = 1;
  return lock;
}

bool has_size(const struct stat& status, uint64_t bytes) noexcept {
  return S_ISREG(status.st_mode) && status.st_size >= 0 &&
         static_cast<uint64_t>(status.st_size) == bytes;
}

}  // namespace

SharedPages SharedPages::make(uint64_t bytes) {
  Descriptor descriptor(memfd_create("modicum", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.is_valid() || ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail_errno(errno, "cannot make memory that processes share");
  }
  const std::span<std::byte> memory = mapped(descriptor.get(), bytes);
  if (memory.empty()) fail_errno(errno, "cannot map memory that processes share");
  return {descriptor.release(), memory};
}

std::optional<SharedPages> SharedPages::open(const std::string& path, uint64_t bytes) noexcept {
  struct stat status {};
  // The type is checked before open, since opening a device can have an effect.
  if (stat(path.c_str(), &status) != 0 || !has_size(status, bytes)) return std::nullopt;
  Descriptor file = Descriptor::open(path.c_str(), O_RDWR | O_NONBLOCK);
  if (!file.is_valid() || fstat(file.get(), &status) != 0 || !has_size(status, bytes)) {
    return std::nullopt;
  }
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return std::nullopt;
  const std::span<std::byte> memory = mapped(file.get(), bytes);
  if (memory.empty()) return std::nullopt;
  return SharedPages(file.release(), memory);
}

SharedPages::SharedPages(SharedPages&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), memory_(std::exchange(other.memory_, {})) {}

SharedPages::~SharedPages() {
  if (!memory_.empty()) munmap(memory_.data(), memory_.size());
  if (fd_ >= 0) close(fd_);
}

bool SharedPages::mark() const noexcept {
  struct flock lock = lock_of(getpid());
  return fcntl(fd_, F_SETLK, &lock) == 0;
}

bool SharedPages::is_marked_by(int pid) const noexcept {
  struct flock lock = lock_of(pid);
  return fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

std::string SharedPages::path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_); }

}  // namespace modicum
