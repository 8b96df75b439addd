#include "modicum/checkpoint/owner.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr int64_t kPollNs = 20 * kNsPerMs;

// The boot id in SaveOwner::host, which is NAME.BOOT_ID.START; empty if there is none.
std::string_view boot_of(std::string_view host) {
  const size_t end = host.rfind('.');
  if (end == std::string_view::npos) return {};
  const size_t begin = host.substr(0, end).rfind('.');
  if (begin == std::string_view::npos) return {};
  return host.substr(begin + 1, end - begin - 1);
}

bool is_of_same_boot(const SaveOwner& a, const SaveOwner& b) {
  return !boot_of(a.host).empty() && boot_of(a.host) == boot_of(b.host);
}

bool is_of_another_boot(const SaveOwner& a, const SaveOwner& b) {
  return !boot_of(a.host).empty() && !boot_of(b.host).empty() && boot_of(a.host) != boot_of(b.host);
}

}  // namespace

std::string owner_json(const OwnerRecord& record) {
  JsonWriter out;
  out.begin_object().member("uuid", record.uuid).member("locked", record.is_locked);
  owner_members(out, record.process);
  return out.end_object().text();
}

std::optional<OwnerRecord> parse_owner(const std::string& text) {
  OwnerRecord record;
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        read_owner_member(key, member, record.process);
        if (key == "uuid") record.uuid = member.string();
        if (key == "locked") record.is_locked = member.boolean();
      });
    });
  } catch (const JsonError&) {
    return std::nullopt;
  }
  return record.uuid.empty() ? std::nullopt : std::optional(record);
}

OwnerFile::OwnerFile(FileSystem& files, std::string path, std::unique_ptr<LockedFile> file,
                     OwnerRecord record, int64_t renewal_ns)
    : files_(files),
      path_(std::move(path)),
      file_(std::move(file)),
      record_(std::move(record)),
      pid_(::getpid()) {
  record_.is_locked = file_->is_exclusive();
  try {
    file_->write(owner_json(record_));
  } catch (const Error&) {
    files_.remove(path_);  // without a record it would be of an unknown owner
    throw;
  }
  if (record_.is_locked && files_.is_of_one_kernel(path_)) return;
  try {
    renewal_ = std::make_unique<Renewal>();
    renewal_->thread = std::thread([this, renewal_ns] { renew(*renewal_, renewal_ns); });
  } catch (const std::system_error& error) {
    files_.remove(path_);
    fail(Category::no_memory, fmt::format("no thread can be started: {}", error.code().message()));
  }
}

OwnerFile::~OwnerFile() {
  if (pid_ != ::getpid()) {  // the thread is the parent's
    static_cast<void>(renewal_.release());
    return;
  }
  end_renewal();
}

void OwnerFile::end_renewal() {
  if (!renewal_) return;
  {
    const std::lock_guard guard(renewal_->mutex);
    renewal_->is_over = true;
  }
  renewal_->ends.notify_one();
  renewal_->thread.join();
  renewal_.reset();
}

void OwnerFile::renew(Renewal& renewal, int64_t every_ns) {
  const std::string text = owner_json(record_);
  std::unique_lock guard(renewal.mutex);
  while (!renewal.ends.wait_for(guard, std::chrono::nanoseconds(every_ns),
                                [&] { return renewal.is_over; })) {
    try {
      file_->write(text);
    } catch (const Error&) {
      // If this lasts as long as the lease, another process may take over: require_ours throws.
    }
  }
}

bool OwnerFile::is_ours() const {
  const std::optional<SeenFile> seen = files_.look_at(path_);
  if (seen && (!seen->mtime_ns || seen->text.empty())) {
    const std::string why = seen->error.empty() ? "" : ": " + seen->error;
    fail(Category::io, "the owner's record can't be read" + why, {.file = base_name(path_)});
  }
  const std::optional<OwnerRecord> record = seen ? parse_owner(seen->text) : std::nullopt;
  return record && record->uuid == record_.uuid;
}

void OwnerFile::require_ours() const {
  if (is_ours()) return;
  fail(Category::conflict,
       "another process has taken over, since this one seemed to have ended: it gives up",
       {.file = base_name(path_)});
}

void OwnerFile::remove() {
  if (pid_ != ::getpid()) return;
  const bool is_removed = is_ours();
  end_renewal();
  if (is_removed) files_.remove(path_);  // while it is locked: after that it may be another owner's
  file_.reset();                         // an open file stays on NFS, under another name
}

std::unique_ptr<OwnerFile> own_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight) {
  const std::string path = join_path(in_flight.directory, kOwnerFile);
  std::unique_ptr<LockedFile> file = files.lock(path);
  if (!file) fail(Category::conflict, "another process has the new file", {.file = kOwnerFile});
  return std::make_unique<OwnerFile>(files, path, std::move(file),
                                     OwnerRecord{in_flight.owner, in_flight.uuid});
}

OwnerCheck::OwnerCheck(FileSystem& files, std::string directory, const SaveOwner& self,
                       std::function<bool(const SaveOwner&)> is_dead)
    : files_(files),
      directory_(std::move(directory)),
      self_(self),
      is_dead_(std::move(is_dead)),
      is_of_one_kernel_(files.is_of_one_kernel(directory_)) {}

Life OwnerCheck::of_file(const SeenFile& seen) {
  const std::optional<OwnerRecord> record = parse_owner(seen.text);
  if (record && is_of_same_boot(record->process, self_)) {
    if (record->is_locked) return seen.lock == LockState::free ? Life::dead : Life::lives;
  } else if (record && is_of_another_boot(record->process, self_)) {
    // Of one kernel is another boot's only if it holds no lock: containers may have boot ids of
    // their own.
    if (is_of_one_kernel_) return seen.lock == LockState::locked ? Life::lives : Life::dead;
  } else if (seen.lock == LockState::locked) {
    return Life::lives;
  }
  return is_old(seen) ? Life::dead : Life::silent;
}

Life OwnerCheck::of_name(const SaveOwner& owner) {
  if (is_of_another_boot(owner, self_)) return is_of_one_kernel_ ? Life::dead : Life::silent;
  if (is_dead_(owner)) return Life::dead;
  return owner.host == self_.host ? Life::lives : Life::silent;
}

bool OwnerCheck::may_be_elsewhere(const SeenFile& seen) const {
  const std::optional<OwnerRecord> record = parse_owner(seen.text);
  return !is_of_one_kernel_ && !(record && is_of_same_boot(record->process, self_));
}

bool OwnerCheck::is_old(const SeenFile& seen) {
  if (!seen.mtime_ns) return false;
  const std::optional<int64_t> now = now_ns();
  return now && *now - *seen.mtime_ns > kLeaseNs;
}

// Asks the file server by writing a file. It is named as trash, which the next save removes.
std::optional<int64_t> OwnerCheck::now_ns() {
  const std::string path = join_path(directory_, std::string(kTrashPrefix) + make_uuid());
  try {
    const std::unique_ptr<LockedFile> file = files_.lock(path);
    if (!file) return std::nullopt;
    file->write("now");
    const std::optional<SeenFile> seen = files_.look_at(path);
    files_.remove(path);
    return seen ? seen->mtime_ns : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

RootLock::RootLock(FileSystem& files, const std::string& root, int64_t limit_ns, Clock& clock,
                   const std::function<void()>& waits)
    : files_(files), path_(join_path(root, ".lock")), pid_(::getpid()) {
  const int64_t end_ns = clock.now_ns() + limit_ns;
  while (!try_lock()) {
    is_refused_ = clock.now_ns() >= end_ns;
    if (is_refused_) return;
    waits();
    clock.sleep_ns(std::min(kPollNs, limit_ns));
  }
}

// Returns whether it need not be tried again.
bool RootLock::try_lock() {
  try {
    file_ = files_.lock(path_);
    return file_ != nullptr;
  } catch (const Error&) {
    return true;  // it can't be opened: it is another user's, or a link
  }
}

RootLock::~RootLock() {
  if (!file_ || pid_ != ::getpid()) return;
  try {
    files_.remove(path_);
  } catch (const Error&) {
    // It stays: an empty file that any later save can lock.
  }
}

}  // namespace modicum
