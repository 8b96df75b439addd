// A checkpoint as readers find it: COMMIT, manifest.json and the recorded files.
#include "modicum/checkpoint/run_files.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/base/base.h"
#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr uint64_t kLongestCommit = 64 * kKiB;  // those of Modicum have less than 1 KiB

struct Commit {
  int64_t step = -1;
  std::string uuid;
  uint64_t manifest_bytes = 0;
  std::string manifest_digest;
};

Commit parse_commit(const std::string& text) {
  Commit commit;
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        if (key == "step") commit.step = member.integer();
        if (key == "uuid") commit.uuid = member.string();
        if (key == "manifest_bytes")
          commit.manifest_bytes = static_cast<uint64_t>(member.integer());
        if (key == "manifest_digest") commit.manifest_digest = member.string();
      });
    });
  } catch (const JsonError& error) {
    fail(Category::integrity, error.what(), {.file = kCommit, .offset = error.offset});
  }
  return commit;
}

// Opens a file of a checkpoint. A file that is absent, or of another kind, damages the checkpoint.
std::unique_ptr<File> open_file(FileSystem& files, const std::string& directory,
                                const std::string& name) {
  const std::string path = join_path(directory, name);
  std::optional<DirectoryEntry> entry = files.entry(path);
  if (entry && entry->is_link) {
    entry = files.exists(path) ? files.entry(files.real_path(path)) : std::nullopt;
  }
  if (!entry) fail(Category::integrity, "a file of the checkpoint is missing", {.file = name});
  if (!entry->is_regular) {
    fail(Category::integrity, "a file of the checkpoint is not a regular file", {.file = name});
  }
  return files.open(path);
}

}  // namespace

std::string text_of(FileSystem& files, const std::string& directory, const std::string& name) {
  const uint64_t most = name == kCommit ? kLongestCommit : kLongestText;
  return read_text(*open_file(files, directory, name), most, Category::integrity);
}

bool has_record(FileSystem& files, const std::string& path) {
  const std::string manifest = join_path(path, kManifest);
  if (!files.exists(manifest)) return false;
  const std::unique_ptr<File> file = files.open(manifest);
  return file->identity().size_bytes <= kLongestText &&
         is_record(read_text(*file, kLongestText, Category::integrity));
}

bool is_run_checkpoint(FileSystem& files, const std::string& path) {
  return step_of(base_name(path)) || base_name(path).starts_with(kPartialPrefix) ||
         files.exists(join_path(path, kCommit)) || has_record(files, path);
}

std::optional<std::string> committed_uuid(FileSystem& files, const std::string& path) {
  try {
    return parse_commit(text_of(files, path, kCommit)).uuid;
  } catch (const Error& error) {
    if (is_damage(error.category()) || !files.entry(path)) return std::nullopt;
    throw;
  }
}

namespace {

// Reads and compares COMMIT and manifest.json.
RunCheckpoint read_record(FileSystem& files, const std::string& path) {
  if (!files.exists(join_path(path, kCommit))) {
    fail(Category::uncommitted, "the checkpoint was not committed", {.file = kCommit});
  }
  const Commit commit = parse_commit(text_of(files, path, kCommit));
  const std::string manifest = text_of(files, path, kManifest);
  if (manifest.size() != commit.manifest_bytes ||
      digest_of(manifest).hex() != commit.manifest_digest) {
    fail(Category::integrity, "the manifest is not the one that was committed",
         {.file = kManifest,
          .expected =
              fmt::format("{} bytes, {}", commit.manifest_bytes, printable(commit.manifest_digest)),
          .got = fmt::format("{} bytes, {}", manifest.size(), digest_of(manifest).hex())});
  }
  RunCheckpoint found{commit.step, path, parse_record(manifest)};
  if (found.record.uuid != commit.uuid || found.record.step != commit.step) {
    fail(Category::integrity, "manifest.json and COMMIT are of different checkpoints",
         {.file = kManifest,
          .expected = fmt::format("step {}, uuid {}", commit.step, printable(commit.uuid)),
          .got = fmt::format("step {}, uuid {}", found.record.step, printable(found.record.uuid))});
  }
  return found;
}

// Opens a file of the checkpoint at `path`, which must have the recorded length.
std::unique_ptr<File> open_recorded(FileSystem& files, const std::string& path,
                                    const CheckpointFile& file) {
  std::unique_ptr<File> opened = open_file(files, path, file.name);
  const uint64_t bytes = opened->identity().size_bytes;
  if (bytes == file.bytes) return opened;
  fail(Category::integrity, "a file of the checkpoint has another length",
       {.file = file.name,
        .expected = fmt::format("{} bytes", file.bytes),
        .got = fmt::format("{} bytes", bytes)});
}

void compare_digest(File& opened, const CheckpointFile& file) {
  const Digest digest = digest_of(opened, file.digested_bytes);
  if (digest == file.digest) return;
  fail(Category::integrity, "the file is not the one that was saved",
       {.file = file.name, .expected = file.digest.hex(), .got = digest.hex()});
}

}  // namespace

RunCheckpoint open_run_checkpoint(FileSystem& files, const std::string& path) {
  RunCheckpoint found = read_record(files, path);
  for (const CheckpointFile& file : found.record.files) open_recorded(files, path, file);
  return found;
}

namespace {

// A file that was added to the checkpoint must not take the place of the saved weights.
void require_recorded_weights(FileSystem& files, const RunCheckpoint& found) {
  const auto& recorded = found.record.files;
  // Adapters are opened by the path of their file.
  const bool has_adapters =
      std::any_of(recorded.begin(), recorded.end(),
                  [](const CheckpointFile& file) { return file.name.starts_with(kAdapterStem); });
  if (has_adapters || found.record.tensors.empty()) return;
  const std::string defining = defining_file(files, found.path);
  if (std::any_of(recorded.begin(), recorded.end(),
                  [&](const CheckpointFile& file) { return file.name == defining; })) {
    return;
  }
  fail(Category::integrity,
       "the checkpoint's record does not list the file that defines its weights",
       {.file = defining});
}

}  // namespace

RunCheckpoint check_run_checkpoint(FileSystem& files, const std::string& path) {
  RunCheckpoint found = read_record(files, path);
  for (const CheckpointFile& file : found.record.files) {
    compare_digest(*open_recorded(files, path, file), file);
  }
  require_recorded_weights(files, found);
  return found;
}

void check_digest(FileSystem& files, const std::string& path, const CheckpointFile& file) {
  compare_digest(*open_file(files, path, file.name), file);
}

}  // namespace modicum
