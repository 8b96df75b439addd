// The owner of work in flight: a process that holds a record lock on an owner file. Part of the
// public header of `checkpoint`.
//
//   ROOT/.partial-13-.../.owner   of a save, while its files are written
//   PARENT/.OUT.owner             of a conversion, from before its first file until OUT is visible
//
//   boot ids      file system          the owner is dead
//   equal         any                  if the lock is free: one kernel has all its processes, in
//                                      whatever container, of whatever user
//   differ        of one kernel        always: that kernel no longer runs
//   differ        any other            if it has not renewed the file for kLeaseNs, by the clock of
//                                      the file server
//
// An owner that can't be asked lives. An owner whose file system has no locks, or whose boot id is
// not known, has a lease, too. Names of hosts decide nothing. What only has a name with a pid, as
// modicum 0.1 left it, is dead if that process is (see ProcessIdentity), or by the second line.
//
// No lock and no lease protects committed work: a checkpoint is published by a rename that replaces
// nothing, and a save removes only checkpoints that were committed when it began.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "modicum/base/base.h"
#include "modicum/checkpoint/run.h"
#include "modicum/io/io.h"

namespace modicum {

constexpr const char* kOwnerFile = ".owner";
constexpr int64_t kRenewalNs = 60 * kNsPerSecond;
constexpr int64_t kLeaseNs = 600 * kNsPerSecond;
// How long a save waits for another one that publishes in the same root.
constexpr int64_t kRootLockNs = 60 * kNsPerSecond;

// The content of an owner file.
struct OwnerRecord {
  SaveOwner process;
  std::string uuid;       // of this piece of work: another process has another one
  bool is_locked = true;  // false if the file system has no locks
};
std::string owner_json(const OwnerRecord& record);
std::optional<OwnerRecord> parse_owner(const std::string& text);  // empty if it is none

// This process as the owner of a file. Where a lease can count, a thread renews it. A forked child
// is not the owner: its copy of this object does nothing. Not thread-safe.
class OwnerFile {
 public:
  // `file`: the locked file at `path`, to which the record is written. Throws NOSPACE or IO.
  OwnerFile(FileSystem& files, std::string path, std::unique_ptr<LockedFile> file,
            OwnerRecord record, int64_t renewal_ns = kRenewalNs);
  ~OwnerFile();  // ends the lock; the file stays
  OwnerFile(const OwnerFile&) = delete;
  OwnerFile& operator=(const OwnerFile&) = delete;

  // Throws CONFLICT if the file is gone, or is another owner's by now; IO if it can't be read. A
  // forked child may call it, on behalf of its parent.
  void require_ours() const;
  // Closes the file, and removes it if it is this owner's; nothing may be called afterwards. Throws
  // IO.
  void remove();

 private:
  bool is_ours() const;
  void end_renewal();

  // A thread that writes the record again and again. A forked child has no such thread, and may not
  // destroy what it waits for.
  struct Renewal {
    std::mutex mutex;  // guards is_over
    std::condition_variable ends;
    bool is_over = false;
    std::thread thread;
  };
  void renew(Renewal& renewal, int64_t every_ns);

  FileSystem& files_;
  const std::string path_;
  std::unique_ptr<LockedFile> file_;
  OwnerRecord record_;
  const int pid_;
  std::unique_ptr<Renewal> renewal_;
};

// Makes the owner file of a checkpoint in flight. Throws NOSPACE or IO.
std::unique_ptr<OwnerFile> own_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight);

enum class Life {
  dead,
  lives,
  silent,  // can't be asked: of another kernel, and its lease runs
};

// Judges the owners of work in flight in `directory`.
class OwnerCheck {
 public:
  // `self`: this process. `is_dead`: whether a process of this kernel is known to have ended, which
  // is asked only for owners without a file.
  OwnerCheck(FileSystem& files, std::string directory, const SaveOwner& self,
             std::function<bool(const SaveOwner&)> is_dead);

  Life of_file(const SeenFile& seen);
  Life of_name(const SaveOwner& owner);
  // Whether the file was written more than kLeaseNs ago.
  bool is_old(const SeenFile& seen);
  // Whether the process of the file's record may run on another kernel.
  bool may_be_elsewhere(const SeenFile& seen) const;

 private:
  std::optional<int64_t> now_ns();  // by the clock of the file server

  FileSystem& files_;
  const std::string directory_;
  const SaveOwner self_;
  const std::function<bool(const SaveOwner&)> is_dead_;
  const bool is_of_one_kernel_;
};

// The lock of a root, ROOT/.lock. A process that has it publishes a checkpoint there, and removes
// old ones; others wait. Since no committed work depends on the lock, a save goes on without it if
// the file can't be locked, or if it has waited for long enough.
class RootLock {
 public:
  // Waits for `limit_ns` at most, and meanwhile calls `waits`, which may throw.
  RootLock(
      FileSystem& files, const std::string& root, int64_t limit_ns, Clock& clock,
      const std::function<void()>& waits = [] {});
  ~RootLock();
  RootLock(const RootLock&) = delete;
  RootLock& operator=(const RootLock&) = delete;

  // Whether another save had the lock all the time. It may be removing checkpoints.
  bool is_refused() const noexcept { return is_refused_; }

 private:
  bool try_lock();

  FileSystem& files_;
  const std::string path_;
  const int pid_;
  std::unique_ptr<LockedFile> file_;  // null without a lock, too
  bool is_refused_ = false;
};

}  // namespace modicum
