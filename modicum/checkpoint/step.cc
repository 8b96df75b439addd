#include "modicum/checkpoint/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <random>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr const char* kCommit = "COMMIT";
constexpr std::string_view kStepPrefix = "step-";
constexpr uint64_t kLongestCommit = 64 * kKiB;  // those of Modicum have less than 1 KiB

struct Commit {
  int64_t step = -1;
  std::string uuid;
  uint64_t manifest_bytes = 0;
  std::string manifest_digest;
};

std::string commit_json(const StepRecord& record, const std::string& manifest) {
  JsonWriter out;
  out.begin_object()
      .member("step", record.step)
      .member("uuid", record.uuid)
      .member("manifest_bytes", manifest.size())
      .member("manifest_digest", digest_of(manifest).hex())
      .end_object();
  return out.text();
}

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

template <class Number>
bool parse_digits(std::string_view digits, Number& number) {
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return error == std::errc() && end == digits.data() + digits.size();
}

// Opens a file of a step. A file that is absent, or of another kind, damages the step.
std::unique_ptr<File> open_file(FileSystem& files, const std::string& directory,
                                const std::string& name) {
  const std::string path = join_path(directory, name);
  std::optional<DirectoryEntry> entry = files.entry(path);
  if (entry && entry->is_link) {
    entry = files.exists(path) ? files.entry(files.real_path(path)) : std::nullopt;
  }
  if (!entry) fail(Category::integrity, "a file of the step is missing", {.file = name});
  if (!entry->is_regular) {
    fail(Category::integrity, "a file of the step is not a regular file", {.file = name});
  }
  return files.open(path);
}

std::string text_of(FileSystem& files, const std::string& directory, const std::string& name) {
  const uint64_t most = name == kCommit ? kLongestCommit : kLongestText;
  return read_text(*open_file(files, directory, name), most, Category::integrity);
}

// The name holds the owner, so that a directory in flight has an owner from the start.
std::string name_in_flight(int64_t step, const StepOwner& owner, std::string_view uuid) {
  return fmt::format("{}{}-{}-{}-{}-{}", kPartialPrefix, step, owner.host, owner.pid, owner.started,
                     uuid);
}

void make_in_flight(FileSystem& files, const StepOwner& owner, StepInFlight& step) {
  step.owner = owner;
  step.directory = join_path(step.root, name_in_flight(step.step, owner, step.uuid));
  files.make_directory(step.directory);
  if (const auto entry = files.entry(step.directory)) step.user = entry->owner;
}

// The files of a step would be renamed to, and stale ones removed from, where a link leads.
void refuse_links(FileSystem& files, const std::string& directory) {
  for (const char* const name : kDirectories) {
    if (!is_link(files, join_path(directory, name))) continue;
    fail(Category::conflict, "a directory of the step is a symbolic link", {.file = name});
  }
}

// Returns whether all of them are durable.
bool sync_directories(FileSystem& files, const std::string& step) {
  bool is_durable = true;
  for (const char* const name : kDirectories) {
    const std::string directory = join_path(step, name);
    if (files.is_directory(directory)) is_durable &= files.sync_directory(directory);
  }
  return is_durable;
}

// The model's weights in a directory, by whatever program.
std::vector<std::string> weights_in(FileSystem& files, const std::string& directory) {
  std::vector<std::string> names = files.list(directory);
  std::erase_if(names, [&](const std::string& name) {
    return !is_weights_name(name) || files.is_directory(join_path(directory, name));
  });
  return names;
}

// The tensor files, and files in subdirectories, of the record in a directory, if it has a valid
// one.
std::vector<std::string> tensor_files_of(FileSystem& files, const std::string& directory) {
  std::vector<std::string> names;
  try {
    if (!files.exists(join_path(directory, kManifest))) return names;
    const std::string manifest = text_of(files, directory, kManifest);
    if (!is_record(manifest)) return names;
    for (const StepFile& file : parse_record(manifest).files) {
      const bool has_tensors = file.name.ends_with(".safetensors") || file.name == kIndexFile;
      if (has_tensors || file.name.find('/') != std::string::npos) names.push_back(file.name);
    }
  } catch (const Error& error) {
    if (!is_damage(error.category())) throw;
    // Another program's manifest.json: it is replaced.
  }
  return names;
}

// Removes the subdirectories that only the previous step had. `stale`: its files that were removed.
// Returns a warning if there are any.
std::optional<std::string> remove_directories(FileSystem& files, const StepInFlight& step,
                                              const std::vector<std::string>& stale) {
  std::optional<std::string> warning;
  for (const char* const name : kDirectories) {
    const std::string directory = join_path(step.root, name);
    const bool is_stale = std::any_of(stale.begin(), stale.end(), [&](const std::string& file) {
      return file.starts_with(fmt::format("{}/", name));
    });
    if (!is_stale || files.is_directory(join_path(step.directory, name))) continue;
    if (files.is_directory(directory) && files.list(directory).empty()) files.remove(directory);
    warning = fmt::format("{}the previous save's files in {}/ were removed; this save has none",
                          warning ? *warning + "; " : "", name);
  }
  return warning;
}

// Renames the files of a step into the directory that becomes the step. Then removes the files
// that no new file has replaced: those of the previous step, and other weights of a whole model,
// which readers would take for the step's.
Published place_files(FileSystem& files, const StepInFlight& step, const StepRecord& record) {
  refuse_links(files, step.root);
  std::vector<std::string> stale = tensor_files_of(files, step.root);
  // Next to adapters, weights of another program may be the base model.
  if (std::any_of(record.files.begin(), record.files.end(),
                  [](const StepFile& file) { return is_weights_name(file.name); })) {
    const std::vector<std::string> weights = weights_in(files, step.root);
    stale.insert(stale.end(), weights.begin(), weights.end());
  }
  for (const char* const name : kDirectories) {
    const std::string to = join_path(step.root, name);
    const bool is_needed = files.is_directory(join_path(step.directory, name));
    if (is_needed && !files.is_directory(to)) files.make_directory(to);
  }
  for (const StepFile& file : record.files) {
    files.rename(join_path(step.directory, file.name), join_path(step.root, file.name));
    std::erase(stale, file.name);
  }
  files.rename(join_path(step.directory, kManifest), join_path(step.root, kManifest));
  for (const std::string& name : stale) {
    if (files.exists(join_path(step.root, name))) files.remove(join_path(step.root, name));
  }
  Published placed;
  if (const auto warning = remove_directories(files, step, stale)) {
    placed.warnings.push_back(*warning);
  }
  placed.depend_on(sync_directories(files, step.root));
  placed.depend_on(files.sync_directory(step.root));
  return placed;
}

Published commit_inside(FileSystem& files, const StepInFlight& step, const std::string& text) {
  replace(files, {step.root, kCommit, ".COMMIT"}, text);
  return make_durable_or_take_back([&] { return files.sync_directory(step.root); },
                                   [&] { files.remove(join_path(step.root, kCommit)); });
}

Published publish_inside(FileSystem& files, const StepInFlight& step, const StepRecord& record,
                         const std::string& manifest) {
  Published published = place_files(files, step, record);
  published.take_in(commit_inside(files, step, commit_json(record, manifest)));
  try {
    files.remove_tree(step.directory);
  } catch (const Error& error) {
    published.warnings.push_back(fmt::format("the step is saved, but {} could not be removed: {}",
                                             base_name(step.directory), error.what()));
  }
  return published;
}

}  // namespace

std::string make_uuid() {
  std::random_device device;
  std::uniform_int_distribution<uint64_t> bits;
  const uint64_t high = bits(device);
  return hex(high) + hex(bits(device));
}

std::string step_name(int64_t step) { return fmt::format("{}{}", kStepPrefix, step); }

std::optional<StepOwner> owner_in(std::string_view name, std::string_view prefix) {
  enum { kStep, kHost, kPid, kStarted, kUuid, kParts };
  std::array<std::string_view, kParts> parts;
  std::string_view rest = name.substr(prefix.size());
  for (size_t i = 0; i < kParts; ++i) {
    const size_t end = rest.find('-');
    if ((end == std::string_view::npos) != (i == kUuid)) return std::nullopt;
    parts[i] = rest.substr(0, end);
    if (i != kUuid) rest.remove_prefix(end + 1);
  }
  StepOwner owner{.host = std::string(parts[kHost])};
  if (!parse_digits(parts[kPid], owner.pid) || !parse_digits(parts[kStarted], owner.started)) {
    return std::nullopt;
  }
  return owner;
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kStepPrefix.size());
  int64_t step = 0;
  if (!parse_digits(digits, step)) return std::nullopt;
  return step >= 0 && step_name(step) == name ? std::optional(step) : std::nullopt;
}

namespace {

// No record is too long for a reader, so a manifest.json that is belongs to another program.
bool has_record(FileSystem& files, const std::string& path) {
  const std::string manifest = join_path(path, kManifest);
  if (!files.exists(manifest)) return false;
  const std::unique_ptr<File> file = files.open(manifest);
  return file->identity().size_bytes <= kLongestText &&
         is_record(read_text(*file, kLongestText, Category::integrity));
}

}  // namespace

bool is_step(FileSystem& files, const std::string& path) {
  return step_of(base_name(path)) || base_name(path).starts_with(kPartialPrefix) ||
         files.exists(join_path(path, kCommit)) || has_record(files, path);
}

Digest digest_of(std::string_view bytes) {
  Hasher hasher;
  hasher.add(bytes);
  return hasher.digest();
}

Digest digest_of(File& file, uint64_t bytes) {
  Hasher hasher;
  hasher.add(bytes);
  read_in_blocks(file, bytes,
                 [&](std::span<const std::byte> block, uint64_t) { hasher.add_part(block); });
  return hasher.digest();
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

std::map<int64_t, std::string> committed_steps(FileSystem& files, const std::string& root) {
  std::map<int64_t, std::string> uuids;
  for (const std::string& name : files.list(root)) {
    const std::optional<int64_t> step = step_of(name);
    if (!step) continue;
    if (const auto uuid = committed_uuid(files, join_path(root, name))) uuids[*step] = *uuid;
  }
  return uuids;
}

}  // namespace

StepInFlight begin_step(FileSystem& files, const std::string& root_given, int64_t step,
                        const StepOwner& owner, bool retains) {
  const std::string root = real_directory(files, root_given);
  bool is_durable = true;
  if (!files.is_directory(root)) {
    files.make_directory(root);
    is_durable = files.sync_directory(parent_path(root));
  }
  if (is_listed(files, root, step_name(step))) {
    fail(Category::conflict, "the step has been saved already", {.file = step_name(step)});
  }
  StepInFlight made{root, step, make_uuid(), ""};
  made.is_durable = is_durable;
  if (retains) made.committed = committed_steps(files, root);
  make_in_flight(files, owner, made);
  return made;
}

StepInFlight begin_step_in(FileSystem& files, const std::string& directory_given, int64_t step,
                           const StepOwner& owner) {
  const std::string directory = real_directory(files, directory_given);
  if (!files.is_directory(directory)) files.make_directory(directory);
  refuse_links(files, directory);
  tensor_files_of(files, directory);  // refuses a step of a later version
  StepInFlight made{directory, step, make_uuid(), "", true};
  // Other programs make this directory just before the save.
  made.is_durable = files.sync_directory(parent_path(directory));
  make_in_flight(files, owner, made);
  made.is_durable &= files.sync_directory(directory);
  const std::string commit = join_path(directory, kCommit);
  if (files.exists(commit)) {
    files.remove(commit);
    made.is_durable &= files.sync_directory(directory);
  }
  return made;
}

namespace {

// Writes manifest.json, without checksums if it would be too long with them. Returns its text.
std::string write_manifest(FileSystem& files, const std::string& directory,
                           const StepRecord& record) {
  std::string manifest = record_json(record);
  if (manifest.size() > kLongestText) manifest = record_json(record, false);
  require_readable(manifest.size(), kManifest);
  write_durably(files, join_path(directory, kManifest), manifest);
  return manifest;
}

}  // namespace

bool commit_in_place(FileSystem& files, const std::string& directory, const StepRecord& record) {
  const std::string manifest = write_manifest(files, directory, record);
  bool is_durable = sync_directories(files, directory);
  // Also syncs the directory, and with it the names of all files, before the step is visible.
  is_durable &=
      replace_durably(files, {directory, kCommit, ".COMMIT"}, commit_json(record, manifest));
  return is_durable;
}

Published publish_step(FileSystem& files, const StepInFlight& step, const StepRecord& record) {
  if (step.is_inside) {
    Published published =
        publish_inside(files, step, record, write_manifest(files, step.directory, record));
    published.depend_on(step.is_durable);
    return published;
  }
  const bool is_durable = commit_in_place(files, step.directory, record);
  const std::string name = step_name(step.step);
  Published published = publish_directory(files, step.directory, join_path(step.root, name));
  published.depend_on(is_durable && step.is_durable);
  const std::string in_flight = base_name(step.directory).substr(kPartialPrefix.size());
  try {
    replace_durably(files, {step.root, "latest", fmt::format("{}{}", kLatestPrefix, in_flight)},
                    name + "\n");
  } catch (const Error& error) {
    published.warnings.push_back(
        fmt::format("{} is saved, but `latest` could not be written: {}", name, error.what()));
  }
  return published;
}

void discard_step(FileSystem& files, const StepInFlight& step) noexcept {
  try {
    if (step.is_inside) return files.empty_directory(step.directory);
    (void)remove_by_trash(files, step.root, base_name(step.directory));  // as below
  } catch (const Error&) {
    // What is left is not visible as a step; a later save removes it.
  }
}

namespace {

// Reads and compares COMMIT and manifest.json.
FoundStep read_record(FileSystem& files, const std::string& path) {
  if (!files.exists(join_path(path, kCommit))) {
    fail(Category::uncommitted, "the step was not committed", {.file = kCommit});
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
  FoundStep found{commit.step, path, parse_record(manifest)};
  if (found.record.uuid != commit.uuid || found.record.step != commit.step) {
    fail(Category::integrity, "manifest.json and COMMIT are of different steps",
         {.file = kManifest,
          .expected = fmt::format("step {}, uuid {}", commit.step, printable(commit.uuid)),
          .got = fmt::format("step {}, uuid {}", found.record.step, printable(found.record.uuid))});
  }
  return found;
}

// Opens a file of the step at `path`, which must have the recorded length.
std::unique_ptr<File> open_recorded(FileSystem& files, const std::string& path,
                                    const StepFile& file) {
  std::unique_ptr<File> opened = open_file(files, path, file.name);
  const uint64_t bytes = opened->identity().size_bytes;
  if (bytes == file.bytes) return opened;
  fail(Category::integrity, "a file of the step has another length",
       {.file = file.name,
        .expected = fmt::format("{} bytes", file.bytes),
        .got = fmt::format("{} bytes", bytes)});
}

void compare_digest(File& opened, const StepFile& file) {
  const Digest digest = digest_of(opened, file.digested_bytes);
  if (digest == file.digest) return;
  fail(Category::integrity, "the file is not the one that was saved",
       {.file = file.name, .expected = file.digest.hex(), .got = digest.hex()});
}

}  // namespace

FoundStep open_step(FileSystem& files, const std::string& path) {
  FoundStep found = read_record(files, path);
  for (const StepFile& file : found.record.files) open_recorded(files, path, file);
  return found;
}

namespace {

// A file that was added to the step must not take the place of the saved weights.
void require_recorded_weights(FileSystem& files, const FoundStep& found) {
  const auto& recorded = found.record.files;
  // Adapters are opened by the path of their file.
  const bool has_adapters = std::any_of(recorded.begin(), recorded.end(), [](const StepFile& file) {
    return file.name.starts_with(kAdapterStem);
  });
  if (has_adapters || found.record.tensors.empty()) return;
  const std::string defining = defining_file(files, found.path);
  if (std::any_of(recorded.begin(), recorded.end(),
                  [&](const StepFile& file) { return file.name == defining; })) {
    return;
  }
  fail(Category::integrity, "the step's record does not list the file that defines its weights",
       {.file = defining});
}

}  // namespace

FoundStep check_step(FileSystem& files, const std::string& path) {
  FoundStep found = read_record(files, path);
  for (const StepFile& file : found.record.files) {
    compare_digest(*open_recorded(files, path, file), file);
  }
  require_recorded_weights(files, found);
  return found;
}

void check_digest(FileSystem& files, const std::string& path, const StepFile& file) {
  compare_digest(*open_file(files, path, file.name), file);
}

}  // namespace modicum
