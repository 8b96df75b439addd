#include <limits.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "modicum/io/descriptor.h"
#include "modicum/io/errno_error.h"
#include "modicum/io/file.h"
#include "modicum/io/posix_place.h"

namespace modicum {
namespace {

// Linux transfers at most 2 GiB minus a page per call; calls of 1 GiB keep the offsets aligned.
constexpr size_t kMaxPerCall = kGiB;

int64_t ns_of(const struct timespec& time) noexcept {
  return int64_t{time.tv_sec} * kNsPerSecond + time.tv_nsec;
}

FileIdentity identity_of(const struct stat& status) noexcept {
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .size_bytes = static_cast<uint64_t>(status.st_size),
          .mtime_ns = ns_of(status.st_mtim),
          .ctime_ns = ns_of(status.st_ctim)};
}

class PosixFile final : public File {
 public:
  PosixFile(Descriptor descriptor, std::string name)
      : descriptor_(std::move(descriptor)), name_(std::move(name)) {}

  const std::string& name() const noexcept override { return name_; }

  FileIdentity identity() override {
    struct stat status {};
    if (::fstat(fd(), &status) != 0) fail_errno(errno, "cannot stat the file", {.file = name_});
    return identity_of(status);
  }

  void read(std::span<std::byte> out, uint64_t offset) override {
    size_t done = 0;
    while (done < out.size()) {
      const size_t size = std::min(out.size() - done, kMaxPerCall);
      const ssize_t got = uninterrupted([&] {
        return ::pread(fd(), out.data() + done, size, static_cast<off_t>(offset + done));
      });
      if (got < 0) fail_errno(errno, "read failed", {.file = name_, .offset = offset + done});
      if (got == 0) {
        fail(Category::format_trunc, "the file ends inside the range to read",
             {.file = name_,
              .offset = offset,
              .expected = std::to_string(out.size()),
              .got = std::to_string(done)});
      }
      done += static_cast<size_t>(got);
    }
  }

  bool read_around(std::span<std::byte> out, uint64_t offset,
                   std::span<std::byte> room) noexcept override {
    std::call_once(direct_opened_, [this] { open_direct(); });
    if (!direct_) return false;
    const uint64_t most = room.size() / kPageBytes * kPageBytes;
    const uint64_t end = offset + out.size();
    for (uint64_t at = offset; at < end;) {
      const uint64_t begin = at / kPageBytes * kPageBytes;
      const uint64_t size = std::min(most, round_up(end, kPageBytes) - begin);
      const ssize_t got = uninterrupted(
          [&] { return ::pread(direct_->get(), room.data(), size, static_cast<off_t>(begin)); });
      const uint64_t next = std::min(end, begin + size);
      // The file may end on the last page that is read, but not before `next`.
      if (got < 0 || begin + static_cast<uint64_t>(got) < next) return false;
      std::memcpy(out.data() + (at - offset), room.data() + (at - begin), next - at);
      at = next;
    }
    return true;
  }

  void write(std::span<const std::byte> from, uint64_t offset) override {
    size_t done = 0;
    while (done < from.size()) {
      const size_t size = std::min(from.size() - done, kMaxPerCall);
      const ssize_t written = uninterrupted([&] {
        return ::pwrite(fd(), from.data() + done, size, static_cast<off_t>(offset + done));
      });
      // Repeating a write that writes 0 bytes without an error could loop forever.
      if (written == 0) errno = EIO;
      if (written <= 0) fail_errno(errno, "write failed", {.file = name_, .offset = offset + done});
      done += static_cast<size_t>(written);
    }
  }

  void truncate(uint64_t size_bytes) override {
    const int result =
        uninterrupted([&] { return ::ftruncate(fd(), static_cast<off_t>(size_bytes)); });
    if (result != 0) fail_errno(errno, "truncate failed", {.file = name_, .offset = size_bytes});
  }

  // Not posix_fallocate, which writes to every block where the file system can't reserve space.
  void allocate(uint64_t size_bytes) override {
    require_free(size_bytes);
    const int result =
        uninterrupted([&] { return ::fallocate(fd(), 0, 0, static_cast<off_t>(size_bytes)); });
    if (result == 0) return;
    const int error = errno;
    if (error == EOPNOTSUPP || error == ENOSYS) {  // as on NFS before 4.2
      if (identity().size_bytes < size_bytes) truncate(size_bytes);
      return;
    }
    fail_errno(error, "cannot reserve space", {.file = name_, .offset = size_bytes});
  }

  // Throws NOSPACE before fallocate would: a fallocate that fails takes all free space first, and
  // in the meantime other processes can't write. Blocks that are reserved for root count as free,
  // since this process may be root's.
  void require_free(uint64_t size_bytes) {
    struct stat status {};
    struct statvfs system {};
    if (::fstat(fd(), &status) != 0 || ::fstatvfs(fd(), &system) != 0) return;
    // st_blocks counts units of 512 bytes on every file system.
    const uint64_t allocated_bytes = saturating_mul(static_cast<uint64_t>(status.st_blocks), 512);
    const uint64_t needed = size_bytes - std::min(size_bytes, allocated_bytes);
    const uint64_t free = saturating_mul(system.f_bfree, system.f_frsize);
    // Some file systems (FUSE) report 0 blocks in total: their free space is not known.
    if (system.f_blocks == 0 || needed <= free) return;
    fail_errno(ENOSPC, "cannot reserve space",
               {.file = name_,
                .expected = fmt::format("{} bytes free", needed),
                .got = std::to_string(free)});
  }

  // Never retried, not even after EINTR: after a failed fsync the kernel may have dropped the dirty
  // pages, and the next fsync would report success for lost data.
  void sync() override {
    if (::fsync(fd()) != 0) fail_errno(errno, "sync failed", {.file = name_});
  }

  void close() override {
    const int open_fd = fd();
    descriptor_.release();
    direct_.reset();
    // Linux releases the descriptor even if close fails, so EINTR must not be retried. `sync` has
    // reported the errors of writes.
    if (::close(open_fd) != 0 && errno != EINTR) fail_errno(errno, "close failed", {.file = name_});
  }

  std::optional<uint64_t> cached_bytes(uint64_t begin, uint64_t end) noexcept override;

  void drop_cached(uint64_t begin, uint64_t end) noexcept override {
    // For the kernel a length of 0 means up to the end of the file.
    if (begin >= end) return;
    static_cast<void>(::posix_fadvise(descriptor_.get(), static_cast<off_t>(begin),
                                      static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED));
  }

  void start_writeback(uint64_t begin, uint64_t end) override {
    sync_range(begin, end, SYNC_FILE_RANGE_WRITE);
  }

  void finish_writeback(uint64_t begin, uint64_t end) override {
    sync_range(begin, end,
               SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  }

 private:
  int fd() const {
    MODICUM_ASSERT(descriptor_.is_valid());
    return descriptor_.get();
  }

  // Leaves `direct_` empty unless the file system reports an alignment that divides a page, as file
  // systems on a local disk do. Network file systems report none, and gain more from the kernel's
  // read-ahead than O_DIRECT saves.
  void open_direct() noexcept {
    struct statx status {};
    if (::statx(descriptor_.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return;
    const uint32_t align = std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
    if (align == 0 || kPageBytes % align != 0) return;
    // Opened through /proc, because the path may name another file by now.
    std::array<char, 32> path{};
    fmt::format_to_n(path.data(), path.size() - 1, "/proc/self/fd/{}", descriptor_.get());
    direct_.emplace(Descriptor::open(path.data(), O_RDONLY | O_DIRECT));
  }

  // Linux reports a failed write-back once for each descriptor: if sync_file_range has reported it,
  // fsync succeeds.
  void sync_range(uint64_t begin, uint64_t end, unsigned int flags) {
    // For the kernel a length of 0 means up to the end of the file.
    if (begin >= end) return;
    const int result = uninterrupted([&] {
      return ::sync_file_range(fd(), static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                               flags);
    });
    const bool is_unsupported = errno == ENOSYS || errno == ESPIPE || errno == EINVAL;
    if (result == 0 || is_unsupported) return;
    fail_errno(errno, "write-back failed", {.file = name_, .offset = begin});
  }

  Descriptor descriptor_;
  std::string name_;
  std::once_flag direct_opened_;
  std::optional<Descriptor> direct_;  // for read_around
};

// Uses cachestat(2), new in Linux 6.5, by its number, which older C libraries don't define.
std::optional<uint64_t> PosixFile::cached_bytes(uint64_t begin, uint64_t end) noexcept {
  constexpr long kCachestatCall = 451;
  struct Range {
    uint64_t begin;
    uint64_t size;
  };
  struct Counts {
    uint64_t cached;
    uint64_t dirty;
    uint64_t in_writeback;
    uint64_t evicted;
    uint64_t recently_evicted;
  };
  if (begin >= end) return 0;
  Range range{begin, end - begin};
  Counts counts{};
  if (::syscall(kCachestatCall, descriptor_.get(), &range, &counts, 0U) != 0) return std::nullopt;
  // The kernel counts whole pages. If one of them is not cached, the result must be less than the
  // length of the range.
  const uint64_t pages = (end - 1) / kPageBytes - begin / kPageBytes + 1;
  if (counts.cached >= pages) return end - begin;
  return std::min(counts.cached * kPageBytes, end - begin - 1);
}

// stat(2). Returns false if the path does not exist.
bool get_status(const std::string& path, struct stat& status) {
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail_errno(errno, "cannot stat", about(path));
  return false;
}

std::string path_of(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

// The regular file that was opened at `path`. `descriptor`: not valid if that failed, with errno.
std::unique_ptr<File> regular_file(Descriptor descriptor, const std::string& path) {
  if (!descriptor.is_valid()) fail_errno(errno, "cannot open", about(path));
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) {
    fail_errno(errno, "cannot stat the file", about(path));
  }
  if (!S_ISREG(status.st_mode)) fail(Category::io, "not a regular file", about(path));
  return std::make_unique<PosixFile>(std::move(descriptor), base_name(path));
}

// `from`: where the file is opened, if that is not `path`.
std::unique_ptr<File> open_regular(const std::string& path, int flags, const char* from = nullptr) {
  // Without O_NONBLOCK, opening a FIFO would block until its other end is opened.
  const char* const at = from != nullptr ? from : path.c_str();
  Descriptor descriptor = Descriptor::open(at, flags | O_NONBLOCK);
  // Another process has a lease on the regular file (Samba, a server of NFS): wait for its end.
  const bool is_leased = !descriptor.is_valid() && errno == EWOULDBLOCK;
  return regular_file(is_leased ? Descriptor::open(at, flags) : std::move(descriptor), path);
}

// openat(2) at a place, without following a link of this name.
Descriptor open_at(const Place& at, int flags, mode_t mode = 0) {
  const int all = flags | O_NOFOLLOW | O_CLOEXEC;
  return Descriptor(
      uninterrupted([&] { return ::openat(at.directory.get(), at.name.c_str(), all, mode); }));
}

}  // namespace

std::unique_ptr<File> PosixFileSystem::open(const std::string& path) {
  return open_regular(path, O_RDONLY);
}

// What the link leads to is opened as a mere place first, of which the kernel knows the real path:
// no file elsewhere is opened, not even a device, and the path is that of the file which is read.
std::unique_ptr<File> PosixFileSystem::open_own(const std::string& path,
                                                std::span<const std::string> directories) {
  if (link_target(path).empty()) return open_regular(path, O_RDONLY | O_NOFOLLOW);
  const Descriptor place = Descriptor::open(path.c_str(), O_PATH);
  if (!place.is_valid()) fail_errno(errno, "cannot open", about(path));
  const std::string opened = path_of(place.get());
  const std::string real = link_target(opened);
  const bool is_own = std::any_of(
      directories.begin(), directories.end(),
      [&](const std::string& directory) { return real.starts_with(join_path(directory, "")); });
  return is_own ? open_regular(path, O_RDONLY, opened.c_str()) : nullptr;
}

std::string PosixFileSystem::real_path(const std::string& path) {
  const Descriptor place = Descriptor::open(path.c_str(), O_PATH);
  if (!place.is_valid()) fail_errno(errno, "cannot open", about(path));
  return link_target(path_of(place.get()));
}

std::unique_ptr<File> PosixFileSystem::open_to_write(const std::string& path) {
  return regular_file(open_at(open_place(path, "cannot open"), O_WRONLY | O_NONBLOCK), path);
}

std::unique_ptr<File> PosixFileSystem::create(const std::string& path) {
  const Place place = open_place(path, "cannot create");
  Descriptor descriptor = open_at(place, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (!descriptor.is_valid()) {
    if (errno == EEXIST) fail(Category::conflict, "the file exists already", about(path));
    fail_errno(errno, "cannot create", about(path));
  }
  return std::make_unique<PosixFile>(std::move(descriptor), base_name(path));
}

bool PosixFileSystem::exists(const std::string& path) {
  struct stat status {};
  return get_status(path, status);
}

bool PosixFileSystem::is_directory(const std::string& path) {
  struct stat status {};
  return get_status(path, status) && S_ISDIR(status.st_mode);
}

std::string PosixFileSystem::link_target(const std::string& path) {
  std::array<char, PATH_MAX> target;
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  if (length >= 0) return {target.data(), static_cast<size_t>(length)};
  if (errno == EINVAL) return {};
  fail_errno(errno, "cannot read the link", about(path));
}

std::optional<DirectoryEntry> PosixFileSystem::entry(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) {
    return DirectoryEntry{.is_link = S_ISLNK(status.st_mode),
                          .owner = status.st_uid,
                          .device = status.st_dev,
                          .inode = status.st_ino,
                          .is_directory = S_ISDIR(status.st_mode),
                          .is_regular = S_ISREG(status.st_mode),
                          .size_bytes = static_cast<uint64_t>(status.st_size)};
  }
  if (errno != ENOENT && errno != ENOTDIR) fail_errno(errno, "cannot stat", about(path));
  return std::nullopt;
}

void PosixFileSystem::make_directory(const std::string& path) {
  const Place place = open_place(path, "cannot make the directory");
  if (::mkdirat(place.directory.get(), place.name.c_str(), 0777) == 0) return;
  if (errno == EEXIST) fail(Category::conflict, "the directory exists already", about(path));
  fail_errno(errno, "cannot make the directory", about(path));
}

namespace {

// renameat2(2). With no flags it is renameat(2), which every kernel and file system has.
int rename_places(const std::string& from, const std::string& to, unsigned int flags) {
  const Place source = open_place(from, "cannot rename");
  const Place target = open_place(to, "cannot rename");
  const int in = source.directory.get(), destination = target.directory.get();
  const char* const name = source.name.c_str();
  if (flags == 0) return ::renameat(in, name, destination, target.name.c_str());
  return ::renameat2(in, name, destination, target.name.c_str(), flags);
}

}  // namespace

void PosixFileSystem::rename(const std::string& from, const std::string& to) {
  if (rename_places(from, to, 0) == 0) return;
  if (errno == EEXIST || errno == ENOTEMPTY) {
    fail(Category::conflict, "the directory to be replaced is not empty", about(to));
  }
  fail_errno(errno, "cannot rename", about(from));
}

void PosixFileSystem::rename_new(const std::string& from, const std::string& to) {
  if (rename_places(from, to, RENAME_NOREPLACE) == 0) return;
  const int error = errno;
  const bool is_unsupported = error == ENOSYS || error == EINVAL;  // as on NFS
  if (error == EEXIST || (is_unsupported && entry(to))) {
    fail(Category::conflict, "the name is taken already", about(to));
  }
  if (!is_unsupported) fail_errno(error, "cannot rename", about(from));
  rename(from, to);
}

void PosixFileSystem::remove(const std::string& path) {
  const Place place = open_place(path, "cannot remove");
  const int in = place.directory.get();
  if (::unlinkat(in, place.name.c_str(), 0) == 0) return;
  if (errno == EISDIR && ::unlinkat(in, place.name.c_str(), AT_REMOVEDIR) == 0) return;
  fail_errno(errno, "cannot remove", about(path));
}

bool PosixFileSystem::sync_directory(const std::string& path) {
  const Place place = open_place(path, "cannot open the directory");
  const Descriptor directory = open_at(place, O_RDONLY | O_DIRECTORY);
  if (!directory.is_valid()) {
    if (errno == EACCES) return false;
    fail_errno(errno, "cannot open the directory", about(path));
  }
  if (::fsync(directory.get()) == 0) return true;
  // As on some FUSE file systems.
  if (errno == EINVAL || errno == ENOTSUP || errno == ENOSYS) return false;
  fail_errno(errno, "sync failed", about(path));
}

std::unique_ptr<File> FileSystem::open_own(const std::string& path, std::span<const std::string>) {
  return open(path);
}

std::string base_name(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "" : "/";
  const size_t slash = path.find_last_of('/', end);
  const size_t begin = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(begin, end + 1 - begin);
}

std::string parent_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string with_real_parent(FileSystem& files, const std::string& path) {
  const std::string parent = parent_path(path);
  if (!files.is_directory(parent)) return path;
  return join_path(files.real_path(parent), base_name(path));
}

std::string real_directory(FileSystem& files, const std::string& path) {
  return files.is_directory(path) ? files.real_path(path) : with_real_parent(files, path);
}

std::string join_path(const std::string& directory, const std::string& name) {
  if (directory.empty()) return name;
  return directory.back() == '/' ? directory + name : directory + "/" + name;
}

}  // namespace modicum
