// The interface to files. C++ code reads and writes checkpoints only through it, so that tests can
// fail the n-th call, lose unsynced writes, or record the reads.
//
// Ownership: a FileSystem outlives the Files it opened. Threads: several threads may read one File
// concurrently, but only one may write or close it. Several processes may write disjoint parts of
// one file if each opens it separately. Inputs are never mapped: a file that shrinks during a read
// must be an error, not a SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

class File {
 public:
  virtual ~File() = default;

  virtual const std::string& name() const noexcept = 0;  // base name, for messages
  virtual FileIdentity identity() = 0;                   // fstat of the open file. Throws IO.

  // Fills `out` with the file's bytes from `offset` on; continues interrupted and short reads.
  // Throws FORMAT.TRUNC if the file ends inside the range (the facts `expected` and `got` are the
  // bytes asked for and read), and IO, with errno's name and the offset, on any other failure.
  virtual void read(std::span<std::byte> out, uint64_t offset) = 0;

  // As `read`, but bypasses the page cache (O_DIRECT): each part is read into `room`, which is
  // page-aligned and has a page or more, and copied from there. Returns false if that fails for any
  // reason; the contents of `out` are then undefined.
  virtual bool read_around(std::span<std::byte> out, uint64_t offset,
                           std::span<std::byte> room) noexcept = 0;

  // Writes `from` at byte `offset`. Throws NOSPACE or IO.
  virtual void write(std::span<const std::byte> from, uint64_t offset) = 0;
  virtual void truncate(uint64_t size_bytes) = 0;
  // Extends a shorter file to `size_bytes` and, where the file system can, reserves space for all
  // of it, so that later writes can't run out of space. Throws NOSPACE or IO.
  virtual void allocate(uint64_t size_bytes) = 0;
  // On success all writes are durable. On failure (NOSPACE, IO) the file must be discarded, since a
  // second sync may report success for lost pages.
  virtual void sync() = 0;
  // Closes the file. Throws IO if that fails; the file is closed nevertheless. The destructor
  // closes without an error.
  virtual void close() = 0;

  // The functions below are about the page cache; those that are noexcept never fail.

  // How many bytes of the range are cached; nullopt if the kernel can't tell. The result equals the
  // length of the range only if every page of the range is cached.
  virtual std::optional<uint64_t> cached_bytes(uint64_t begin, uint64_t end) noexcept = 0;
  virtual void drop_cached(uint64_t begin, uint64_t end) noexcept = 0;
  // start_writeback begins to write the dirty pages of the range to the disk; finish_writeback
  // waits until they are written. Both do nothing where the kernel can't. On failure (NOSPACE, IO)
  // the file must be discarded: the kernel reports such an error once, so `sync` may not.
  virtual void start_writeback(uint64_t begin, uint64_t end) = 0;
  virtual void finish_writeback(uint64_t begin, uint64_t end) = 0;
};

// What a path itself names: a symbolic link is not followed.
struct DirectoryEntry {
  bool is_link = false;
  uint64_t owner = 0;  // user id
  uint64_t device = 0, inode = 0;
  bool is_directory = false;
  bool is_regular = false;
  uint64_t size_bytes = 0;
};

// A file that this process has locked; see FileSystem::lock. The destructor ends the lock.
class LockedFile {
 public:
  virtual ~LockedFile() = default;

  // False where the file system has no locks: then other processes can have the file, too.
  virtual bool is_exclusive() const noexcept = 0;
  virtual bool is_new() const noexcept = 0;  // was made by FileSystem::lock
  // Replaces the content, which is durable then. Throws NOSPACE or IO.
  virtual void write(const std::string& text) = 0;
};

enum class LockState {
  free,
  locked,   // by this process or another one
  unknown,  // the file can't be opened, or the file system has no locks
};

// A small file that processes lock.
struct SeenFile {
  std::string text;                 // the first 4 KiB; empty if the file can't be read
  std::optional<int64_t> mtime_ns;  // on a network file system by the server's clock
  LockState lock = LockState::unknown;
  std::string error;  // why the file can't be read, such as "EIO (Input/output error)"
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // The functions throw NOSPACE if there is no space or quota left, and IO for every other error
  // for which no category is named below.
  //
  // Those that create, write, lock, rename, remove or sync follow no symbolic link of the path, so
  // that they change nothing elsewhere when another process replaces a directory by a link: they
  // throw CONFLICT, with the link's name, if a directory of the path is one. So a job calls
  // real_directory or with_real_parent, once, for a path that its user has given.

  // Opens a regular file for reading; follows symbolic links. Throws IO for any other kind of file
  // (directory, FIFO, device), and for files that are absent or not readable.
  virtual std::unique_ptr<File> open(const std::string& path) = 0;
  // As `open`, but of a link opens only a file below one of the `directories`, which are real
  // paths; returns null for other links. Another process may change the links meanwhile. (A
  // FileSystem without links need not override this and real_path.)
  virtual std::unique_ptr<File> open_own(const std::string& path,
                                         std::span<const std::string> directories);
  // The absolute path of the same file or directory, without links.
  virtual std::string real_path(const std::string& path) { return path; }
  // Creates a file for writing. Throws CONFLICT if the path exists.
  virtual std::unique_ptr<File> create(const std::string& path) = 0;

  // Opens an existing regular file for writing. Throws IO in the cases of `open`, and for a link.
  virtual std::unique_ptr<File> open_to_write(const std::string& path) = 0;

  // `exists` and `is_directory` follow symbolic links: for a dangling link they return false. They
  // throw IO if the path can't be examined, for example because a directory on it may not be
  // searched.
  virtual bool exists(const std::string& path) = 0;
  virtual bool is_directory(const std::string& path) = 0;
  // The path that a symbolic link holds; empty for other files.
  virtual std::string link_target(const std::string& path) = 0;
  // Empty if there is none.
  virtual std::optional<DirectoryEntry> entry(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& directory) = 0;  // base names, sorted
  // The parent must exist. Throws CONFLICT if the path exists.
  virtual void make_directory(const std::string& path) = 0;
  // Replaces a file or an empty directory at `to`. Throws CONFLICT if `to` is a non-empty
  // directory.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  // As rename, but throws CONFLICT if there is anything at `to`. Where the file system can't do
  // this in one step, an empty directory or a file that another process makes at `to` may be
  // replaced.
  virtual void rename_new(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& path) = 0;  // a file, a link or an empty directory
  // Removes a file, or a directory with everything in it. Never follows a symbolic link: the link
  // is removed, also one by which another process has just replaced a directory. Does not enter a
  // mounted file system. After a failure removes the rest, then throws the first error. What is
  // removed already, or by another process meanwhile, is no error.
  virtual void remove_tree(const std::string& path) = 0;
  // As remove_tree, but keeps the directory itself. Throws IO if `path` is not a directory.
  virtual void empty_directory(const std::string& path) = 0;
  // Makes the directory's entries durable. Returns false if that is not possible: the file system
  // can't (EINVAL, ENOTSUP, ENOSYS), or this process may not read the directory. Throws on any
  // other failure, after which the entries may be lost although a second call succeeds.
  virtual bool sync_directory(const std::string& path) = 0;

  // The functions below are about files that show whether the process that has made them lives.

  // Locks a regular file, which is made if there is none, with a POSIX record lock: the kernel ends
  // it with the process, and a forked child does not have it. Returns null if another process, or
  // another LockedFile of this process, has the lock. Follows no symbolic link. The kernel ends the
  // lock, too, if this process closes any descriptor of the file: only `look_at` may open it.
  virtual std::unique_ptr<LockedFile> lock(const std::string& path) = 0;
  // Reads a file that processes lock. Does not end a lock. Empty if there is none.
  virtual std::optional<SeenFile> look_at(const std::string& path) = 0;
  // Whether at most one kernel at a time can have the path's file system mounted: a local disk, not
  // a network. False if that is not known.
  virtual bool is_of_one_kernel(const std::string& path) noexcept = 0;
};

// The files of the operating system. Stateless.
class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<File> open(const std::string& path) override;
  std::unique_ptr<File> open_own(const std::string& path,
                                 std::span<const std::string> directories) override;
  std::string real_path(const std::string& path) override;
  std::unique_ptr<File> create(const std::string& path) override;
  std::unique_ptr<File> open_to_write(const std::string& path) override;
  bool exists(const std::string& path) override;
  bool is_directory(const std::string& path) override;
  std::string link_target(const std::string& path) override;
  std::optional<DirectoryEntry> entry(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void rename_new(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void remove_tree(const std::string& path) override;
  void empty_directory(const std::string& path) override;
  bool sync_directory(const std::string& path) override;
  std::unique_ptr<LockedFile> lock(const std::string& path) override;
  std::optional<SeenFile> look_at(const std::string& path) override;
  bool is_of_one_kernel(const std::string& path) noexcept override;
};

std::string base_name(const std::string& path);  // "c" of "a/b/c" and of "a/b/c/"
std::string parent_path(std::string path);       // "a/b" of "a/b/c" and of "a/b/c/"; "." of "c"
std::string join_path(const std::string& directory, const std::string& name);
// The same path without links in its directory; a link of this name itself stays. Returns `path` if
// there is no such directory.
std::string with_real_parent(FileSystem& files, const std::string& path);
// The real path of a directory that exists, or that is to be made.
std::string real_directory(FileSystem& files, const std::string& path);

}  // namespace modicum
