#include "modicum/checkpoint/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <random>

#include "modicum/base/base.h"
#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr std::string_view kStepPrefix = "step-";

template <class Number>
bool parse_digits(std::string_view digits, Number& number) {
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return error == std::errc() && end == digits.data() + digits.size();
}

// The name holds the owner, so that a directory in flight has an owner from the start.
std::string name_in_flight(int64_t step, const SaveOwner& owner, std::string_view uuid) {
  return fmt::format("{}{}-{}-{}-{}-{}", kPartialPrefix, step, owner.host, owner.pid, owner.started,
                     uuid);
}

}  // namespace

void make_in_flight(FileSystem& files, const SaveOwner& owner, CheckpointInFlight& in_flight) {
  in_flight.owner = owner;
  in_flight.directory =
      join_path(in_flight.root, name_in_flight(in_flight.step, owner, in_flight.uuid));
  files.make_directory(in_flight.directory);
  if (const auto entry = files.entry(in_flight.directory)) in_flight.user = entry->owner;
}

bool sync_directories(FileSystem& files, const std::string& checkpoint) {
  bool is_durable = true;
  for (const char* const name : kDirectories) {
    const std::string directory = join_path(checkpoint, name);
    if (files.is_directory(directory)) is_durable &= files.sync_directory(directory);
  }
  return is_durable;
}

std::string commit_json(const CheckpointRecord& record, const std::string& manifest) {
  JsonWriter out;
  out.begin_object()
      .member("step", record.step)
      .member("uuid", record.uuid)
      .member("manifest_bytes", manifest.size())
      .member("manifest_digest", digest_of(manifest).hex())
      .end_object();
  return out.text();
}

std::string make_uuid() {
  std::random_device device;
  std::uniform_int_distribution<uint64_t> bits;
  const uint64_t high = bits(device);
  return hex(high) + hex(bits(device));
}

std::string step_name(int64_t step) { return fmt::format("{}{}", kStepPrefix, step); }

std::optional<SaveOwner> owner_in(std::string_view name, std::string_view prefix) {
  enum { kStep, kHost, kPid, kStarted, kUuid, kParts };
  std::array<std::string_view, kParts> parts;
  std::string_view rest = name.substr(prefix.size());
  for (size_t i = 0; i < kParts; ++i) {
    const size_t end = rest.find('-');
    if ((end == std::string_view::npos) != (i == kUuid)) return std::nullopt;
    parts[i] = rest.substr(0, end);
    if (i != kUuid) rest.remove_prefix(end + 1);
  }
  SaveOwner owner{.host = std::string(parts[kHost])};
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

namespace {

std::map<int64_t, std::string> committed_checkpoints(FileSystem& files, const std::string& root) {
  std::map<int64_t, std::string> uuids;
  for (const std::string& name : files.list(root)) {
    const std::optional<int64_t> step = step_of(name);
    if (!step) continue;
    try {
      if (const auto uuid = committed_uuid(files, join_path(root, name))) uuids[*step] = *uuid;
    } catch (const Error& error) {
      if (error.category() != Category::io) throw;
      uuids[*step] = "";
    }
  }
  return uuids;
}

}  // namespace

CheckpointInFlight begin_checkpoint(FileSystem& files, const std::string& root_given, int64_t step,
                                    const SaveOwner& owner, bool retains) {
  const std::string root = real_directory(files, root_given);
  const bool is_durable = !ensure_directory(files, root) || files.sync_directory(parent_path(root));
  if (is_listed(files, root, step_name(step))) {
    fail(Category::conflict, "the checkpoint has been saved already", {.file = step_name(step)});
  }
  CheckpointInFlight in_flight{root, step, make_uuid(), ""};
  in_flight.is_durable = is_durable;
  if (retains) in_flight.committed = committed_checkpoints(files, root);
  make_in_flight(files, owner, in_flight);
  return in_flight;
}

namespace {

// Writes manifest.json, without checksums if it would be too long with them. Returns its text.
std::string write_manifest(FileSystem& files, const std::string& directory,
                           const CheckpointRecord& record) {
  std::string manifest = record_json(record);
  if (manifest.size() > kLongestText) manifest = record_json(record, false);
  require_readable(manifest.size(), kManifest);
  write_durably(files, join_path(directory, kManifest), manifest);
  return manifest;
}

}  // namespace

bool commit_in_place(FileSystem& files, const std::string& directory,
                     const CheckpointRecord& record) {
  const std::string manifest = write_manifest(files, directory, record);
  bool is_durable = sync_directories(files, directory);
  // Also syncs the directory, and with it the names of all files, before the checkpoint is visible.
  is_durable &=
      replace_durably(files, {directory, kCommit, ".COMMIT"}, commit_json(record, manifest));
  return is_durable;
}

Publication publish_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight,
                               const CheckpointRecord& record) {
  if (in_flight.is_inside) {
    Publication published = publish_inside(files, in_flight, record,
                                           write_manifest(files, in_flight.directory, record));
    published.depend_on(in_flight.is_durable);
    return published;
  }
  const bool is_durable = commit_in_place(files, in_flight.directory, record);
  const std::string name = step_name(in_flight.step);
  Publication published =
      publish_directory(files, in_flight.directory, join_path(in_flight.root, name));
  published.depend_on(is_durable && in_flight.is_durable);
  const std::string save_name = base_name(in_flight.directory).substr(kPartialPrefix.size());
  try {
    replace_durably(files,
                    {in_flight.root, "latest", fmt::format("{}{}", kLatestPrefix, save_name)},
                    name + "\n");
  } catch (const Error& error) {
    published.warnings.push_back(
        fmt::format("{} is saved, but `latest` could not be written: {}", name, error.what()));
  }
  return published;
}

void discard_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight) noexcept {
  try {
    if (in_flight.is_inside) return files.empty_directory(in_flight.directory);
    (void)remove_by_trash(files, in_flight.root, base_name(in_flight.directory));  // as below
  } catch (const Error&) {
    // The rest is not visible as a checkpoint; a later save removes it.
  }
}

}  // namespace modicum
