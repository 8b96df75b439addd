// Test doubles of FileSystem: one in memory, and one that records calls and makes them fail.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "modicum/io/file.h"

namespace modicum {

// Files in memory, without symbolic links. `lose_unsynced()` simulates a power cut: it undoes the
// writes since each file's last `sync`, and the creations, renames and removals since each
// directory's last `sync_directory`. Several threads may use it.
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

  void lose_unsynced();
  // Sets the content of a file, durably, and makes its missing directories. An existing file keeps
  // its inode, so readers that have it open see the change.
  void put(const std::string& path, std::string bytes);
  std::string get(const std::string& path) const;  // the current content, synced or not

  // No lock has a known holder: a test that destroys a LockedFile kills its process.

  // From now on, a file system that several kernels can mount.
  void be_on_a_network();
  // From now on there are no locks.
  void have_no_locks();
  // Advances the clock of the files' times, which otherwise counts changes.
  void advance_ns(int64_t duration_ns);

  struct State;  // public for the File class in the .cc

 private:
  std::unique_ptr<State> state_;
};

// A call recorded by RecordingFileSystem.
struct IoCall {
  std::string what;    // "open", "read", "write", "sync", ...
  std::string file;    // base name
  uint64_t begin = 0;  // range of a read, write or page cache call; size of truncate and allocate
  uint64_t end = 0;
};

// Records calls and passes them on to `under`. The `fail_at`-th recorded call, counted from 1, is
// not passed on but throws IO (EIO); with 0 no call fails. File::name, read_around, cached_bytes
// and drop_cached, which never fail, are not among the recorded calls; successful read_arounds and
// drops have separate lists, and so have write-backs. Several threads may use it.
class RecordingFileSystem final : public FileSystem {
 public:
  explicit RecordingFileSystem(FileSystem& under, int64_t fail_at = 0);
  ~RecordingFileSystem() override;
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

  std::vector<IoCall> calls() const;
  uint64_t bytes_read() const;               // sum over all "read" calls
  std::vector<IoCall> reads_around() const;  // read_around calls that succeeded
  std::vector<IoCall> drops() const;
  std::vector<IoCall> writebacks() const;  // `what` is "start" or "finish"
  // From now on `cached_bytes` reports no page of a file until File::read is first called on it,
  // and then every page, as if the kernel had read the whole file ahead.
  void be_cold();
  // Calls `action` once, before the `number`-th call (counted from 1) is passed on. `action` can do
  // what another process would do at this moment. Must be called before the first recorded call.
  void before_call(int64_t number, std::function<void()> action);
  // The `fail_at`-th call fails with this errno instead of EIO.
  void fail_with(int error);
  // From now on sync_directory returns false, as on a file system that has no such call.
  void refuse_directory_syncs();
  // The `number`-th call and all later ones fail and are not passed on, as after a power cut.
  void cut_power_at(int64_t number);

  struct State;  // public for the File class in the .cc

 private:
  FileSystem& under_;
  std::unique_ptr<State> state_;
};

}  // namespace modicum
