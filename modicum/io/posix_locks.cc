// Files that show, by a POSIX record lock, whether the process that has made them lives.
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "modicum/io/descriptor.h"
#include "modicum/io/errno_error.h"
#include "modicum/io/file.h"
#include "modicum/io/posix_place.h"

namespace modicum {
namespace {

constexpr size_t kMaxText = 4096;

using FileKey = std::pair<dev_t, ino_t>;

FileKey key_of(const struct stat& status) noexcept { return {status.st_dev, status.st_ino}; }

// The files that this process has locked, with further descriptors of them. They stay open as long
// as the lock, which the kernel ends if the process closes any of them.
class LocksOfProcess {
 public:
  // A forked child has none. It makes a table of its own, since at the fork another thread may have
  // had the mutex.
  static LocksOfProcess& get() {
    static std::atomic<LocksOfProcess*> current{nullptr};
    LocksOfProcess* found = current.load();
    if (found != nullptr && found->pid_ == ::getpid()) return *found;
    auto created = std::make_unique<LocksOfProcess>(found);
    if (current.compare_exchange_strong(found, created.get())) found = created.release();
    return *found;
  }
  explicit LocksOfProcess(const LocksOfProcess* of_parent) : of_parent_(of_parent) {}

  std::mutex mutex;  // guards `files`; held while a file is opened and locked
  std::map<FileKey, std::vector<Descriptor>> files;

 private:
  const pid_t pid_ = ::getpid();
  [[maybe_unused]] const LocksOfProcess* const of_parent_;  // reachable, and never freed
};

// The lock covers the file.
struct flock write_lock() noexcept {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

class PosixLockedFile final : public LockedFile {
 public:
  PosixLockedFile(Descriptor descriptor, FileKey key, std::string name, bool is_exclusive,
                  bool is_new)
      : descriptor_(std::move(descriptor)),
        key_(key),
        name_(std::move(name)),
        is_exclusive_(is_exclusive),
        is_new_(is_new) {}

  ~PosixLockedFile() override {
    if (pid_ != ::getpid()) return;  // a forked child: the parent's lock stays
    LocksOfProcess& locks = LocksOfProcess::get();
    const std::lock_guard guard(locks.mutex);
    locks.files.erase(key_);
    const Descriptor closed = std::move(descriptor_);
  }

  bool is_exclusive() const noexcept override { return is_exclusive_; }
  bool is_new() const noexcept override { return is_new_; }

  void write(const std::string& text) override {
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t written = uninterrupted([&] {
        return ::pwrite(descriptor_.get(), text.data() + done, text.size() - done,
                        static_cast<off_t>(done));
      });
      if (written == 0) errno = EIO;
      if (written <= 0) fail_errno(errno, "write failed", {.file = name_});
      done += static_cast<size_t>(written);
    }
    const auto size = static_cast<off_t>(text.size());
    if (uninterrupted([&] { return ::ftruncate(descriptor_.get(), size); }) != 0) {
      fail_errno(errno, "truncate failed", {.file = name_});
    }
    if (::fsync(descriptor_.get()) != 0) fail_errno(errno, "sync failed", {.file = name_});
  }

 private:
  Descriptor descriptor_;
  const FileKey key_;
  const std::string name_;
  const bool is_exclusive_, is_new_;
  const pid_t pid_ = ::getpid();
};

struct OpenLockFile {
  Descriptor descriptor;
  bool is_new = false;
};

OpenLockFile open_or_create(const Place& place, const std::string& path) {
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  const auto open = [&](int flags) {
    return Descriptor(uninterrupted(
        [&] { return ::openat(place.directory.get(), place.name.c_str(), flags, 0666); }));
  };
  while (true) {
    Descriptor created = open(kFlags | O_CREAT | O_EXCL);
    if (created.is_valid()) return {std::move(created), true};
    if (errno != EEXIST) fail_errno(errno, "cannot create", about(path));
    Descriptor found = open(kFlags);
    if (found.is_valid()) return {std::move(found), false};
    if (errno != ENOENT) fail_errno(errno, "cannot open", about(path));
  }
}

// Whether the place still names the file.
bool still_names(const Place& place, const FileKey& key) noexcept {
  struct stat status {};
  const int in = place.directory.get();
  return ::fstatat(in, place.name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
         key_of(status) == key;
}

LockState state_of(int fd) noexcept {
  struct flock lock = write_lock();
  if (uninterrupted([&] { return ::fcntl(fd, F_GETLK, &lock); }) != 0) return LockState::unknown;
  return lock.l_type == F_UNLCK ? LockState::free : LockState::locked;
}

// Sets `error` if it can't be read.
std::string beginning_of(int fd, std::string& error) {
  std::string text(kMaxText, '\0');
  const ssize_t got = uninterrupted([&] { return ::pread(fd, text.data(), text.size(), 0); });
  if (got < 0) error = errno_text(errno);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

int64_t mtime_of(const struct stat& status) noexcept {
  return int64_t{status.st_mtim.tv_sec} * kNsPerSecond + status.st_mtim.tv_nsec;
}

}  // namespace

std::unique_ptr<LockedFile> PosixFileSystem::lock(const std::string& path) {
  LocksOfProcess& locks = LocksOfProcess::get();
  const std::lock_guard guard(locks.mutex);
  while (true) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) == 0 && locks.files.contains(key_of(status))) return nullptr;
    const Place place = open_place(path, "cannot create");
    OpenLockFile opened = open_or_create(place, path);
    if (::fstat(opened.descriptor.get(), &status) != 0) {
      fail_errno(errno, "cannot stat the file", about(path));
    }
    if (!S_ISREG(status.st_mode)) fail(Category::io, "not a regular file", about(path));
    const FileKey key = key_of(status);
    if (const auto entry = locks.files.find(key); entry != locks.files.end()) {
      entry->second.push_back(std::move(opened.descriptor));
      return nullptr;
    }
    struct flock lock = write_lock();
    const int fd = opened.descriptor.get();
    const int result = uninterrupted([&] { return ::fcntl(fd, F_SETLK, &lock); });
    if (result != 0 && (errno == EAGAIN || errno == EACCES)) return nullptr;
    // Who had the lock may have removed the file.
    if (!still_names(place, key)) continue;
    locks.files.try_emplace(key);
    return std::make_unique<PosixLockedFile>(std::move(opened.descriptor), key, base_name(path),
                                             result == 0, opened.is_new);
  }
}

std::optional<SeenFile> PosixFileSystem::look_at(const std::string& path) {
  LocksOfProcess& locks = LocksOfProcess::get();
  const std::lock_guard guard(locks.mutex);
  Descriptor file = Descriptor::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!file.is_valid() && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  SeenFile seen;
  struct stat status {};
  if (!file.is_valid() || ::fstat(file.get(), &status) != 0) {
    seen.error = errno_text(errno);
    return seen;
  }
  if (!S_ISREG(status.st_mode)) {
    seen.error = "not a regular file";
    return seen;
  }
  seen.mtime_ns = mtime_of(status);
  seen.text = beginning_of(file.get(), seen.error);
  const auto entry = locks.files.find(key_of(status));
  if (entry == locks.files.end()) {
    seen.lock = state_of(file.get());
  } else {
    seen.lock = LockState::locked;
    entry->second.push_back(std::move(file));
  }
  return seen;
}

bool PosixFileSystem::is_of_one_kernel(const std::string& path) noexcept {
  // By number, since <linux/magic.h> of older kernels lacks some of them.
  constexpr std::array<uint32_t, 7> kLocal = {
      0xef53,      // ext2, ext3, ext4
      0x58465342,  // xfs
      0x9123683e,  // btrfs
      0xf2f52010,  // f2fs
      0x2fc12fc1,  // zfs
      0x01021994,  // tmpfs
      0x794c7630,  // overlayfs
  };
  struct statfs status {};
  if (::statfs(path.c_str(), &status) != 0) return false;
  const auto type = static_cast<uint32_t>(status.f_type);
  return std::find(kLocal.begin(), kLocal.end(), type) != kLocal.end();
}

}  // namespace modicum
