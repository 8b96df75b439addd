// The test doubles of the file seam: in memory, failing at the n-th call, recording what is read.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "modicum/io/file.h"

namespace modicum {

// Files in memory. `lose_unsynced()` is a power cut: writes since the last `sync` of a file are
// gone, and so are names (files made, renamed, removed) since the last `sync_directory` of their
// directory. There are no symbolic links. Several threads may use it.
class MemoryFileSystem final : public FileSystem {
 public:
  MemoryFileSystem();
  ~MemoryFileSystem() override;
  std::unique_ptr<File> open(const std::string& path) override;
  std::unique_ptr<File> create(const std::string& path) override;
  bool exists(const std::string& path) override;
  bool is_directory(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void sync_directory(const std::string& path) override;

  void lose_unsynced();
  // Puts a whole file there, synced, its directories made as needed. A file that is there already
  // keeps its inode: it has been changed in place, and readers that have it open see it.
  void put(const std::string& path, std::string bytes);
  std::string get(const std::string& path) const;  // as written

  struct State;  // for the files it opened

 private:
  std::unique_ptr<State> state_;
};

// What happened on a RecordingFileSystem, in order.
struct IoCall {
  std::string what;  // "open", "read", "write", "sync", ...
  std::string file;  // base name
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Passes every call on to `under`, keeps a record of it, and throws IO (EIO) at the `fail_at`-th
// call, counted from 1, which is recorded but not passed on; 0 never fails. Only that call fails.
// Hints are not counted; the ranges that were dropped from the page cache are kept apart. Several
// threads may use it.
class RecordingFileSystem final : public FileSystem {
 public:
  explicit RecordingFileSystem(FileSystem& under, int64_t fail_at = 0);
  ~RecordingFileSystem() override;
  std::unique_ptr<File> open(const std::string& path) override;
  std::unique_ptr<File> create(const std::string& path) override;
  bool exists(const std::string& path) override;
  bool is_directory(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void sync_directory(const std::string& path) override;

  std::vector<IoCall> calls() const;
  uint64_t bytes_read() const;  // sum over the "read" calls
  std::vector<IoCall> drops() const;
  // From now on, a file says that nothing of it is cached; once it has been read from, all is, as
  // with a kernel that reads ahead.
  void be_cold();
  // `act` is called once, before the `number`-th call, counted from 1, is passed on: somebody else
  // does something to the files at just this moment. To be set before the first call.
  void before_call(int64_t number, std::function<void()> act);

  struct State;  // for the files it opened

 private:
  FileSystem& under_;
  std::unique_ptr<State> state_;
};

}  // namespace modicum
