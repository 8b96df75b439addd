// The seam for files. All file system calls of the library are behind it (and in io/read_text.h for
// /proc), so that tests can fail the n-th call, forget unsynced writes, or record what was read.
//
// Ownership: a FileSystem outlives the Files it opened. Thread rules: one File may be read from
// several threads at once; writing and closing is for one thread. Inputs are never mapped: a file
// that shrinks under a reader must be an error and not a signal.
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
  virtual FileIdentity identity() = 0;                   // by fstat of the open file; throws IO

  // Fills all of `into` from byte `offset`. Interrupted and short reads are continued. The end of
  // the file inside the range is FORMAT.TRUNC (expected and got are bytes of the range); any other
  // failure is IO, once, with errno's name and the offset that it was met at.
  virtual void read(std::span<std::byte> into, uint64_t offset) = 0;

  // Writes all of `from` at byte `offset`. No space or quota: NOSPACE; else IO.
  virtual void write(std::span<const std::byte> from, uint64_t offset) = 0;
  virtual void truncate(uint64_t size_bytes) = 0;
  // Durable when it returns. A failure is never retried: the file is to be thrown away.
  virtual void sync() = 0;
  // Reports what closing found out; the file can't be used again, whatever it was. The destructor
  // closes silently what was not closed.
  virtual void close() = 0;

  // Hints about the page cache; never an error.
  virtual bool is_cached(uint64_t begin, uint64_t end) noexcept = 0;  // every page of the range
  virtual void drop_cached(uint64_t begin, uint64_t end) noexcept = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // A regular file, for reading; symbolic links are followed. Anything else (directory, FIFO,
  // device), or a file that is not there or not allowed: IO.
  virtual std::unique_ptr<File> open(const std::string& path) = 0;
  // A new file, for writing. It must not exist: CONFLICT.
  virtual std::unique_ptr<File> create(const std::string& path) = 0;

  // Symbolic links are followed, so a dangling one doesn't exist. Not allowed to look: IO.
  virtual bool exists(const std::string& path) = 0;
  virtual bool is_directory(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& directory) = 0;  // base names, sorted
  // The parent must exist and the directory must not: CONFLICT.
  virtual void make_directory(const std::string& path) = 0;
  // Replaces a file or an empty directory at `to`; a directory that holds something: CONFLICT.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& path) = 0;          // a file or an empty directory
  virtual void sync_directory(const std::string& path) = 0;  // its names are durable then
};

// The machine's own. No state.
class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<File> open(const std::string& path) override;
  std::unique_ptr<File> create(const std::string& path) override;
  bool exists(const std::string& path) override;
  bool is_directory(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void sync_directory(const std::string& path) override;
};

std::string base_name(const std::string& path);  // "c" of "a/b/c" and of "a/b/c/"
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace modicum
