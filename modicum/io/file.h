// The seam for files. All file system calls go through it (and io/read_text.h for /proc), so that
// tests can fail the n-th call, lose unsynced writes, or record the reads.
//
// Ownership: a FileSystem outlives the Files it opened. Threads: several threads may read one File
// at once, but only one may write or close it. Several processes may write disjoint parts of a
// file, each through a File of its own. Inputs are never mapped: a file that shrinks during a read
// must be an error, not a SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

class File {
 public:
  virtual ~File() = default;

  virtual const std::string& name() const noexcept = 0;  // base name, for messages
  virtual FileIdentity identity() = 0;                   // by fstat of the open file; IO

  // Fills `into` from byte `offset` on; interrupted and short reads are continued. FORMAT.TRUNC if
  // the file ends inside the range (expected and got are bytes of the range); IO, with errno's name
  // and the offset, for any other failure.
  virtual void read(std::span<std::byte> into, uint64_t offset) = 0;

  // Writes `from` at byte `offset`. NOSPACE or IO.
  virtual void write(std::span<const std::byte> from, uint64_t offset) = 0;
  virtual void truncate(uint64_t size_bytes) = 0;
  // Sets the file's size and, where the file system can, reserves space for all of it, so that
  // later writes can't run out of space. NOSPACE or IO.
  virtual void allocate(uint64_t size_bytes) = 0;
  // On success all writes are durable. On failure (NOSPACE, IO) the file must be discarded, since a
  // second sync may report success for lost pages.
  virtual void sync() = 0;
  // Closes the file and reports errors. Even then it can't be used afterwards. The destructor
  // closes without reporting.
  virtual void close() = 0;

  // Hints about the page cache; never an error.
  virtual bool is_cached(uint64_t begin, uint64_t end) noexcept = 0;  // every page of the range
  virtual void drop_cached(uint64_t begin, uint64_t end) noexcept = 0;
  // start_writeback begins to write the dirty pages of the range back; the next call waits until
  // they are written. `sync` reports the errors.
  virtual void start_writeback(uint64_t begin, uint64_t end) noexcept = 0;
  virtual void finish_writeback(uint64_t begin, uint64_t end) noexcept = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Opens a regular file for reading; symbolic links are followed. IO for anything else (directory,
  // FIFO, device), and for files that are absent or not permitted.
  virtual std::unique_ptr<File> open(const std::string& path) = 0;
  // Creates a file for writing. CONFLICT if it exists.
  virtual std::unique_ptr<File> create(const std::string& path) = 0;

  // Opens a regular file that exists for writing. IO as `open`.
  virtual std::unique_ptr<File> open_to_write(const std::string& path) = 0;

  // Symbolic links are followed, so a dangling one does not exist. IO if the path is not permitted.
  virtual bool exists(const std::string& path) = 0;
  virtual bool is_directory(const std::string& path) = 0;
  // The text of a symbolic link; empty for other files. IO.
  virtual std::string link_target(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& directory) = 0;  // base names, sorted
  // The parent must exist. CONFLICT if the directory exists.
  virtual void make_directory(const std::string& path) = 0;
  // Replaces a file or an empty directory at `to`. CONFLICT for a non-empty directory.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& path) = 0;          // a file or an empty directory
  virtual void sync_directory(const std::string& path) = 0;  // makes its names durable
};

// The files of the operating system. Stateless.
class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<File> open(const std::string& path) override;
  std::unique_ptr<File> create(const std::string& path) override;
  std::unique_ptr<File> open_to_write(const std::string& path) override;
  bool exists(const std::string& path) override;
  bool is_directory(const std::string& path) override;
  std::string link_target(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void sync_directory(const std::string& path) override;
};

std::string base_name(const std::string& path);  // "c" of "a/b/c" and of "a/b/c/"
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace modicum
