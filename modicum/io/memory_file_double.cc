#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "modicum/io/errno_error.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

// A file or a directory: its current state, and the durable one, which survives a power cut.
struct Inode {
  struct Side {
    std::string bytes;                      // content of a file
    std::map<std::string, size_t> entries;  // directory: name to index in State::inodes
  };
  bool is_directory = false;
  int64_t mtime_ns = 0;
  Side now;
  Side durable;
};

// The components of a path, except empty ones and ".".
std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    std::string part = path.substr(begin, end - begin);
    if (!part.empty() && part != ".") parts.push_back(std::move(part));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

// Inodes are never freed: a file that is removed while it is open stays readable, as in POSIX.
// Inode 0 is the root directory. `mutex` guards everything. find_file locks it; the callers of all
// other functions hold it. `doing` is the beginning of an error's text.
struct MemoryFileSystem::State {
  // A resolved path.
  struct Place {
    size_t directory = 0;          // inode of the directory of the last component
    std::string name;              // last component
    std::optional<size_t> number;  // inode of the path, if the path exists
  };

  State() { add_inode(true); }

  size_t add_inode(bool is_directory) {
    inodes.emplace_back().is_directory = is_directory;
    touch(inodes.back());
    return inodes.size() - 1;
  }

  void touch(Inode& inode) { inode.mtime_ns = ++ticks; }

  Place find(const std::string& path, std::string_view doing) {
    const std::vector<std::string> parts = split(path);
    Place place{.directory = 0, .name = "", .number = 0};
    for (const std::string& part : parts) {
      if (!place.number) fail_errno(ENOENT, doing, about(path));
      if (!inodes[*place.number].is_directory) fail_errno(ENOTDIR, doing, about(path));
      const auto& entries = inodes[*place.number].now.entries;
      const auto entry = entries.find(part);
      place.directory = *place.number;
      place.name = part;
      place.number = entry == entries.end() ? std::nullopt : std::optional(entry->second);
    }
    return place;
  }

  size_t find_existing(const std::string& path, std::string_view doing) {
    const Place place = find(path, doing);
    if (!place.number) fail_errno(ENOENT, doing, about(path));
    return *place.number;
  }

  size_t find_file(const std::string& path) {
    const std::lock_guard lock(mutex);
    const size_t number = find_existing(path, "cannot open");
    if (inodes[number].is_directory) fail(Category::io, "not a regular file", about(path));
    return number;
  }

  std::optional<size_t> find_if_any(const std::string& path) {
    try {
      return find(path, "cannot stat").number;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  size_t add_entry(const Place& place, bool is_directory) {
    const size_t number = add_inode(is_directory);
    inodes[place.directory].now.entries[place.name] = number;
    return number;
  }

  void put(const std::string& path, std::string bytes) {
    size_t at = 0;
    const std::vector<std::string> parts = split(path);
    for (size_t i = 0; i < parts.size(); ++i) {
      auto& entries = inodes[at].now.entries;
      auto entry = entries.find(parts[i]);
      if (entry == entries.end()) {
        entry = entries.emplace(parts[i], add_inode(i + 1 < parts.size())).first;
      }
      inodes[at].durable.entries[parts[i]] = entry->second;
      at = entry->second;
    }
    MODICUM_ASSERT(!inodes[at].is_directory);
    inodes[at].now.bytes = bytes;
    inodes[at].durable.bytes = std::move(bytes);
    touch(inodes[at]);
  }

  std::mutex mutex;
  std::deque<Inode> inodes;  // a deque keeps references valid when an inode is added
  int64_t ticks = 0;         // clock of mtime_ns, advanced by each change
  std::set<size_t> locked;
  bool is_of_one_kernel = true, has_locks = true;
};

namespace {

class MemoryFile final : public File {
 public:
  MemoryFile(MemoryFileSystem::State& state, size_t number, std::string name, bool for_writing)
      : state_(state), number_(number), name_(std::move(name)), for_writing_(for_writing) {}

  const std::string& name() const noexcept override { return name_; }

  FileIdentity identity() override {
    const std::lock_guard lock(state_.mutex);
    const Inode& file = inode();
    return {.device = 1,
            .inode = number_,
            .size_bytes = file.now.bytes.size(),
            .mtime_ns = file.mtime_ns,
            .ctime_ns = file.mtime_ns};
  }

  void read(std::span<std::byte> out, uint64_t offset) override {
    const std::lock_guard lock(state_.mutex);
    const std::string& bytes = inode().now.bytes;
    if (for_writing_) fail_errno(EBADF, "read failed", {.file = name_, .offset = offset});
    const uint64_t left = offset < bytes.size() ? bytes.size() - offset : 0;
    const size_t got = std::min<uint64_t>(left, out.size());
    if (got != 0) std::memcpy(out.data(), bytes.data() + offset, got);
    if (got == out.size()) return;
    fail(Category::format_trunc, "the file ends inside the range to read",
         {.file = name_,
          .offset = offset,
          .expected = std::to_string(out.size()),
          .got = std::to_string(got)});
  }

  void write(std::span<const std::byte> from, uint64_t offset) override {
    const std::lock_guard lock(state_.mutex);
    Inode& file = inode();
    check_writable("write failed", offset);
    if (from.empty()) return;
    std::string& bytes = file.now.bytes;
    bytes.resize(std::max<size_t>(bytes.size(), offset + from.size()));
    std::memcpy(bytes.data() + offset, from.data(), from.size());
    state_.touch(file);
  }

  void truncate(uint64_t size_bytes) override {
    const std::lock_guard lock(state_.mutex);
    Inode& file = inode();
    check_writable("truncate failed", size_bytes);
    file.now.bytes.resize(size_bytes);
    state_.touch(file);
  }

  void allocate(uint64_t size_bytes) override {
    const std::lock_guard lock(state_.mutex);
    Inode& file = inode();
    check_writable("cannot reserve space", size_bytes);
    file.now.bytes.resize(std::max<size_t>(file.now.bytes.size(), size_bytes));
    state_.touch(file);
  }

  void sync() override {
    const std::lock_guard lock(state_.mutex);
    Inode& file = inode();
    file.durable.bytes = file.now.bytes;
  }

  void close() override {
    MODICUM_ASSERT(is_open_);
    is_open_ = false;
  }

  bool read_around(std::span<std::byte> out, uint64_t offset,
                   std::span<std::byte>) noexcept override {
    const std::lock_guard lock(state_.mutex);
    const std::string& bytes = inode().now.bytes;
    if (offset > bytes.size() || out.size() > bytes.size() - offset) return false;
    std::memcpy(out.data(), bytes.data() + offset, out.size());
    return true;
  }
  std::optional<uint64_t> cached_bytes(uint64_t begin, uint64_t end) noexcept override {
    return end - begin;
  }
  void drop_cached(uint64_t, uint64_t) noexcept override {}
  void start_writeback(uint64_t, uint64_t) override {}
  void finish_writeback(uint64_t, uint64_t) override {}

 private:
  Inode& inode() {
    MODICUM_ASSERT(is_open_);
    return state_.inodes[number_];
  }
  void check_writable(std::string_view what_failed, uint64_t offset) {
    if (!for_writing_) fail_errno(EBADF, what_failed, {.file = name_, .offset = offset});
  }

  MemoryFileSystem::State& state_;
  size_t number_;
  std::string name_;
  bool for_writing_;
  bool is_open_ = true;
};

class MemoryLockedFile final : public LockedFile {
 public:
  MemoryLockedFile(MemoryFileSystem::State& state, size_t number, bool is_new)
      : state_(state), number_(number), is_exclusive_(state.has_locks), is_new_(is_new) {
    if (is_exclusive_) state_.locked.insert(number_);
  }
  ~MemoryLockedFile() override {
    const std::lock_guard lock(state_.mutex);
    if (is_exclusive_) state_.locked.erase(number_);
  }

  bool is_exclusive() const noexcept override { return is_exclusive_; }
  bool is_new() const noexcept override { return is_new_; }
  void write(const std::string& text) override {
    const std::lock_guard lock(state_.mutex);
    Inode& file = state_.inodes[number_];
    file.now.bytes = file.durable.bytes = text;
    state_.touch(file);
  }

 private:
  MemoryFileSystem::State& state_;
  const size_t number_;
  const bool is_exclusive_, is_new_;
};

}  // namespace

MemoryFileSystem::MemoryFileSystem() : state_(std::make_unique<State>()) {}
MemoryFileSystem::~MemoryFileSystem() = default;

std::unique_ptr<File> MemoryFileSystem::open(const std::string& path) {
  return std::make_unique<MemoryFile>(*state_, state_->find_file(path), base_name(path), false);
}

std::unique_ptr<File> MemoryFileSystem::open_to_write(const std::string& path) {
  return std::make_unique<MemoryFile>(*state_, state_->find_file(path), base_name(path), true);
}

std::unique_ptr<File> MemoryFileSystem::create(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->find(path, "cannot create");
  if (place.number) fail(Category::conflict, "the file exists already", about(path));
  const size_t number = state_->add_entry(place, false);
  return std::make_unique<MemoryFile>(*state_, number, base_name(path), true);
}

bool MemoryFileSystem::exists(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  return state_->find_if_any(path).has_value();
}

std::string MemoryFileSystem::link_target(const std::string&) { return {}; }

std::optional<DirectoryEntry> MemoryFileSystem::entry(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const std::optional<size_t> number = state_->find_if_any(path);
  if (!number) return std::nullopt;
  const Inode& inode = state_->inodes[*number];
  return DirectoryEntry{.device = 1,
                        .inode = *number,
                        .is_directory = inode.is_directory,
                        .is_regular = !inode.is_directory,
                        .size_bytes = inode.now.bytes.size()};
}

bool MemoryFileSystem::is_directory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const std::optional<size_t> number = state_->find_if_any(path);
  return number && state_->inodes[*number].is_directory;
}

std::vector<std::string> MemoryFileSystem::list(const std::string& directory) {
  const std::lock_guard lock(state_->mutex);
  const Inode& inode =
      state_->inodes[state_->find_existing(directory, "cannot list the directory")];
  if (!inode.is_directory) fail_errno(ENOTDIR, "cannot list the directory", about(directory));
  std::vector<std::string> names;
  for (const auto& entry : inode.now.entries) names.push_back(entry.first);
  return names;
}

void MemoryFileSystem::make_directory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->find(path, "cannot make the directory");
  if (place.number) fail(Category::conflict, "the directory exists already", about(path));
  state_->add_entry(place, true);
}

void MemoryFileSystem::rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(state_->mutex);
  constexpr std::string_view kDoing = "cannot rename";
  const State::Place source = state_->find(from, kDoing);
  if (!source.number) fail_errno(ENOENT, kDoing, about(from));
  const State::Place target = state_->find(to, kDoing);
  if (target.number && target.number != source.number) {
    const Inode& replaced = state_->inodes[*target.number];
    if (replaced.is_directory != state_->inodes[*source.number].is_directory) {
      fail_errno(replaced.is_directory ? EISDIR : ENOTDIR, kDoing, about(from));
    }
    if (!replaced.now.entries.empty()) {
      fail(Category::conflict, "the directory to be replaced is not empty", about(to));
    }
  }
  state_->inodes[source.directory].now.entries.erase(source.name);
  state_->inodes[target.directory].now.entries[target.name] = *source.number;
}

void MemoryFileSystem::rename_new(const std::string& from, const std::string& to) {
  if (exists(to)) fail(Category::conflict, "the name is taken already", about(to));
  rename(from, to);
}

void MemoryFileSystem::remove(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->find(path, "cannot remove");
  if (!place.number) fail_errno(ENOENT, "cannot remove", about(path));
  if (!state_->inodes[*place.number].now.entries.empty()) {
    fail_errno(ENOTEMPTY, "cannot remove", about(path));
  }
  state_->inodes[place.directory].now.entries.erase(place.name);
}

// Removes only the name, and with it everything below; all names are durable until they are synced.
void MemoryFileSystem::remove_tree(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->find(path, "cannot remove");
  if (place.number) state_->inodes[place.directory].now.entries.erase(place.name);
}

void MemoryFileSystem::empty_directory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  Inode& inode = state_->inodes[state_->find_existing(path, "cannot open the directory")];
  if (!inode.is_directory) fail_errno(ENOTDIR, "cannot open the directory", about(path));
  inode.now.entries.clear();
}

bool MemoryFileSystem::sync_directory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  Inode& inode = state_->inodes[state_->find_existing(path, "cannot open the directory")];
  if (!inode.is_directory) fail_errno(ENOTDIR, "cannot open the directory", about(path));
  inode.durable.entries = inode.now.entries;
  return true;
}

std::unique_ptr<LockedFile> MemoryFileSystem::lock(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->find(path, "cannot lock");
  const size_t number = place.number ? *place.number : state_->add_entry(place, false);
  if (state_->locked.contains(number)) return nullptr;
  return std::make_unique<MemoryLockedFile>(*state_, number, !place.number);
}

std::optional<SeenFile> MemoryFileSystem::look_at(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const std::optional<size_t> number = state_->find_if_any(path);
  if (!number) return std::nullopt;
  const Inode& file = state_->inodes[*number];
  SeenFile seen{.text = file.now.bytes, .mtime_ns = file.mtime_ns};
  if (state_->has_locks) {
    seen.lock = state_->locked.contains(*number) ? LockState::locked : LockState::free;
  }
  return seen;
}

bool MemoryFileSystem::is_of_one_kernel(const std::string&) noexcept {
  return state_->is_of_one_kernel;
}

void MemoryFileSystem::be_on_a_network() { state_->is_of_one_kernel = false; }

void MemoryFileSystem::have_no_locks() { state_->has_locks = false; }

void MemoryFileSystem::advance_ns(int64_t duration_ns) {
  const std::lock_guard lock(state_->mutex);
  state_->ticks += duration_ns;
}

void MemoryFileSystem::lose_unsynced() {
  const std::lock_guard lock(state_->mutex);
  for (Inode& inode : state_->inodes) inode.now = inode.durable;
}

void MemoryFileSystem::put(const std::string& path, std::string bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->put(path, std::move(bytes));
}

std::string MemoryFileSystem::get(const std::string& path) const {
  const std::lock_guard lock(state_->mutex);
  return state_->inodes[state_->find_existing(path, "cannot open")].now.bytes;
}

}  // namespace modicum
