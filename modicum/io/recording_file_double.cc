#include <cerrno>
#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include "modicum/io/errno_error.h"
#include "modicum/io/file_doubles.h"

namespace modicum {

struct RecordingFileSystem::State {
  // Records a call before it is passed on, and throws if it is to fail. Must be called without
  // `mutex`, since `action` may make calls.
  void note(std::string what, std::string file, uint64_t begin = 0, uint64_t end = 0) {
    const IoCall call{std::move(what), std::move(file), begin, end};
    int64_t number = 0;
    {
      const std::lock_guard lock(mutex);
      calls.push_back(call);
      number = static_cast<int64_t>(calls.size());
    }
    if (number == action_at) action();
    const bool is_cut = cut_at > 0 && number >= cut_at;
    if (number != fail_at && !is_cut) return;
    fail_errno(is_cut ? EIO : error, call.what + " failed", {.file = call.file, .offset = begin});
  }

  int64_t fail_at = 0;
  int error = EIO;  // errno of the `fail_at`-th call
  int64_t cut_at = 0;
  bool syncs_directories = true;
  int64_t action_at = 0;
  std::function<void()> action;
  mutable std::mutex mutex;  // guards everything below
  std::vector<IoCall> calls;
  std::vector<IoCall> drops;
  std::vector<IoCall> reads_around;
  std::vector<IoCall> writebacks;
  bool is_cold = false;
  std::set<std::string> read_since;  // base names of files read since be_cold
};

namespace {

class RecordingFile final : public File {
 public:
  RecordingFile(std::unique_ptr<File> under, RecordingFileSystem::State& state)
      : under_(std::move(under)), state_(state) {}

  const std::string& name() const noexcept override { return under_->name(); }
  FileIdentity identity() override {
    note("identity");
    return under_->identity();
  }
  void read(std::span<std::byte> out, uint64_t offset) override {
    note("read", offset, offset + out.size());
    {
      const std::lock_guard lock(state_.mutex);
      state_.read_since.insert(under_->name());
    }
    under_->read(out, offset);
  }
  void write(std::span<const std::byte> from, uint64_t offset) override {
    note("write", offset, offset + from.size());
    under_->write(from, offset);
  }
  void truncate(uint64_t size_bytes) override {
    note("truncate", size_bytes, size_bytes);
    under_->truncate(size_bytes);
  }
  void allocate(uint64_t size_bytes) override {
    note("allocate", size_bytes, size_bytes);
    under_->allocate(size_bytes);
  }
  void sync() override {
    note("sync");
    under_->sync();
  }
  void close() override {
    note("close");
    under_->close();
  }
  bool read_around(std::span<std::byte> out, uint64_t offset,
                   std::span<std::byte> room) noexcept override {
    if (!under_->read_around(out, offset, room)) return false;
    note_hint(state_.reads_around, "read around", offset, offset + out.size());
    return true;
  }
  std::optional<uint64_t> cached_bytes(uint64_t begin, uint64_t end) noexcept override {
    {
      const std::lock_guard lock(state_.mutex);
      if (state_.is_cold) return state_.read_since.contains(under_->name()) ? end - begin : 0;
    }
    return under_->cached_bytes(begin, end);
  }
  void drop_cached(uint64_t begin, uint64_t end) noexcept override {
    note_hint(state_.drops, "drop", begin, end);
    under_->drop_cached(begin, end);
  }
  void start_writeback(uint64_t begin, uint64_t end) override {
    note("start_writeback", begin, end);
    note_hint(state_.writebacks, "start", begin, end);
    under_->start_writeback(begin, end);
  }
  void finish_writeback(uint64_t begin, uint64_t end) override {
    note("finish_writeback", begin, end);
    note_hint(state_.writebacks, "finish", begin, end);
    under_->finish_writeback(begin, end);
  }

 private:
  void note(std::string what, uint64_t begin = 0, uint64_t end = 0) {
    state_.note(std::move(what), under_->name(), begin, end);
  }
  void note_hint(std::vector<IoCall>& hints, const char* what, uint64_t begin, uint64_t end) {
    const std::lock_guard lock(state_.mutex);
    hints.push_back({what, under_->name(), begin, end});
  }

  std::unique_ptr<File> under_;
  RecordingFileSystem::State& state_;
};

}  // namespace

RecordingFileSystem::RecordingFileSystem(FileSystem& under, int64_t fail_at)
    : under_(under), state_(std::make_unique<State>()) {
  state_->fail_at = fail_at;
}
RecordingFileSystem::~RecordingFileSystem() = default;

void RecordingFileSystem::before_call(int64_t number, std::function<void()> action) {
  state_->action_at = number;
  state_->action = std::move(action);
}

void RecordingFileSystem::fail_with(int error) { state_->error = error; }

void RecordingFileSystem::refuse_directory_syncs() { state_->syncs_directories = false; }

void RecordingFileSystem::cut_power_at(int64_t number) { state_->cut_at = number; }

std::unique_ptr<File> RecordingFileSystem::open(const std::string& path) {
  state_->note("open", base_name(path));
  return std::make_unique<RecordingFile>(under_.open(path), *state_);
}

std::unique_ptr<File> RecordingFileSystem::open_own(const std::string& path,
                                                    std::span<const std::string> directories) {
  state_->note("open", base_name(path));
  std::unique_ptr<File> file = under_.open_own(path, directories);
  return file ? std::make_unique<RecordingFile>(std::move(file), *state_) : nullptr;
}

std::string RecordingFileSystem::real_path(const std::string& path) {
  state_->note("real_path", base_name(path));
  return under_.real_path(path);
}

std::unique_ptr<File> RecordingFileSystem::create(const std::string& path) {
  state_->note("create", base_name(path));
  return std::make_unique<RecordingFile>(under_.create(path), *state_);
}

std::unique_ptr<File> RecordingFileSystem::open_to_write(const std::string& path) {
  state_->note("open_to_write", base_name(path));
  return std::make_unique<RecordingFile>(under_.open_to_write(path), *state_);
}

std::string RecordingFileSystem::link_target(const std::string& path) {
  state_->note("link_target", base_name(path));
  return under_.link_target(path);
}

std::optional<DirectoryEntry> RecordingFileSystem::entry(const std::string& path) {
  state_->note("entry", base_name(path));
  return under_.entry(path);
}

bool RecordingFileSystem::exists(const std::string& path) {
  state_->note("exists", base_name(path));
  return under_.exists(path);
}

bool RecordingFileSystem::is_directory(const std::string& path) {
  state_->note("is_directory", base_name(path));
  return under_.is_directory(path);
}

std::vector<std::string> RecordingFileSystem::list(const std::string& directory) {
  state_->note("list", base_name(directory));
  return under_.list(directory);
}

void RecordingFileSystem::make_directory(const std::string& path) {
  state_->note("make_directory", base_name(path));
  under_.make_directory(path);
}

void RecordingFileSystem::rename(const std::string& from, const std::string& to) {
  state_->note("rename", base_name(from));
  under_.rename(from, to);
}

void RecordingFileSystem::rename_new(const std::string& from, const std::string& to) {
  state_->note("rename_new", base_name(from));
  under_.rename_new(from, to);
}

void RecordingFileSystem::remove(const std::string& path) {
  state_->note("remove", base_name(path));
  under_.remove(path);
}

void RecordingFileSystem::remove_tree(const std::string& path) {
  state_->note("remove_tree", base_name(path));
  under_.remove_tree(path);
}

void RecordingFileSystem::empty_directory(const std::string& path) {
  state_->note("empty_directory", base_name(path));
  under_.empty_directory(path);
}

bool RecordingFileSystem::sync_directory(const std::string& path) {
  state_->note("sync_directory", base_name(path));
  return state_->syncs_directories && under_.sync_directory(path);
}

std::unique_ptr<LockedFile> RecordingFileSystem::lock(const std::string& path) {
  state_->note("lock", base_name(path));
  return under_.lock(path);
}

std::optional<SeenFile> RecordingFileSystem::look_at(const std::string& path) {
  return under_.look_at(path);
}

bool RecordingFileSystem::is_of_one_kernel(const std::string& path) noexcept {
  return under_.is_of_one_kernel(path);
}

std::vector<IoCall> RecordingFileSystem::calls() const {
  const std::lock_guard lock(state_->mutex);
  return state_->calls;
}

std::vector<IoCall> RecordingFileSystem::reads_around() const {
  const std::lock_guard lock(state_->mutex);
  return state_->reads_around;
}

std::vector<IoCall> RecordingFileSystem::drops() const {
  const std::lock_guard lock(state_->mutex);
  return state_->drops;
}

std::vector<IoCall> RecordingFileSystem::writebacks() const {
  const std::lock_guard lock(state_->mutex);
  return state_->writebacks;
}

void RecordingFileSystem::be_cold() {
  const std::lock_guard lock(state_->mutex);
  state_->is_cold = true;
  state_->read_since.clear();
}

uint64_t RecordingFileSystem::bytes_read() const {
  const std::lock_guard lock(state_->mutex);
  uint64_t sum = 0;
  for (const IoCall& call : state_->calls) {
    if (call.what == "read") sum += call.end - call.begin;
  }
  return sum;
}

}  // namespace modicum
