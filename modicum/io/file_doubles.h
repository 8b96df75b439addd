// The test doubles of the file seam: a file system in memory, and one that records and fails calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "modicum/io/file.h"

namespace modicum {

// Files in memory, without symbolic links. `lose_unsynced()` simulates a power cut: it drops writes
// since the last `sync` of a file, and names (created, renamed, removed) since the last
// `sync_directory` of their directory. Several threads may use it.
class MemoryFileSystem final : public FileSystem {
 public:
  MemoryFileSystem();
  ~MemoryFileSystem() override;
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

  void lose_unsynced();
  // Writes a whole file, synced, and makes its directories. An existing file keeps its inode: it is
  // changed in place, and readers that have it open see the change.
  void put(const std::string& path, std::string bytes);
  std::string get(const std::string& path) const;  // as written

  struct State;  // for the files it opened

 private:
  std::unique_ptr<State> state_;
};

// A call recorded by RecordingFileSystem.
struct IoCall {
  std::string what;  // "open", "read", "write", "sync", ...
  std::string file;  // base name
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Records every call and passes it on to `under`. The `fail_at`-th call, counted from 1, is
// recorded and throws IO (EIO) instead; 0 never fails. Hints are not counted; ranges written back
// and dropped from the page cache are recorded separately. Several threads may use it.
class RecordingFileSystem final : public FileSystem {
 public:
  explicit RecordingFileSystem(FileSystem& under, int64_t fail_at = 0);
  ~RecordingFileSystem() override;
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

  std::vector<IoCall> calls() const;
  uint64_t bytes_read() const;  // of all "read" calls
  std::vector<IoCall> drops() const;
  std::vector<IoCall> writebacks() const;  // "start", "finish"
  // From now on `is_cached` is false for a file until it is first read and true afterwards, as with
  // a kernel that reads ahead.
  void be_cold();
  // Calls `act` once, before the `number`-th call (counted from 1) is passed on, to simulate
  // another process. To be set before the first call.
  void before_call(int64_t number, std::function<void()> act);
  // The `fail_at`-th call fails with this errno instead of EIO.
  void fail_with(int error);
  // From the `number`-th call on, none is passed on and all fail, as after a power cut.
  void cut_power_at(int64_t number);

  struct State;  // for the files it opened

 private:
  FileSystem& under_;
  std::unique_ptr<State> state_;
};

}  // namespace modicum
