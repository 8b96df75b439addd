// Removes old checkpoints, and what dead processes have left in flight.
#include <fmt/format.h>

#include "modicum/base/base.h"
#include "modicum/checkpoint/owner.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/run.h"

namespace modicum {

std::string remove_by_trash(FileSystem& files, const std::string& root, const std::string& name) {
  const std::string trash = join_path(root, std::string(kTrashPrefix) + make_uuid());
  files.rename(join_path(root, name), trash);
  files.sync_directory(root);  // else the name could return after a power cut, without its files
  try {
    files.remove_tree(trash);
  } catch (const Error& error) {
    return fmt::format("{} stays: {}", base_name(trash), error.what());
  }
  return {};
}

namespace {

// Removes a name of the checkpoint's root if the save's user owns it. Returns why it stays; empty
// if it is removed, be it by another process.
std::string remove_owned(FileSystem& files, const CheckpointInFlight& in_flight,
                         const std::string& name,
                         FunctionRef<std::string(const DirectoryEntry&)> removal) {
  const std::string path = join_path(in_flight.root, name);
  try {
    const std::optional<DirectoryEntry> entry = files.entry(path);
    if (!entry) return {};
    if (entry->owner != in_flight.user) return fmt::format("user {} owns it", entry->owner);
    return removal(*entry);
  } catch (const Error& error) {
    if (!is_listed(files, in_flight.root, name)) return {};
    return error.what();
  }
}

// Removes a checkpoint that was committed with this uuid when `in_flight` began. If it has been
// replaced since, its own save decides.
std::string remove_checkpoint(FileSystem& files, const CheckpointInFlight& in_flight,
                              const std::string& name, const std::string& uuid) {
  return remove_owned(files, in_flight, name, [&](const DirectoryEntry& entry) -> std::string {
    if (committed_uuid(files, join_path(in_flight.root, name)) != uuid) return {};
    if (!entry.is_link) return remove_by_trash(files, in_flight.root, name);
    // A link to a checkpoint elsewhere: removing it is one call, and its target stays.
    files.remove(join_path(in_flight.root, name));
    return {};
  });
}

std::string remove_leftover(FileSystem& files, const CheckpointInFlight& in_flight,
                            const std::string& name) {
  return remove_owned(files, in_flight, name, [&](const DirectoryEntry& entry) -> std::string {
    // No save makes one: somebody else did.
    if (entry.is_link) fail(Category::conflict, "a symbolic link", {.file = name});
    if (name.starts_with(kPartialPrefix)) return remove_by_trash(files, in_flight.root, name);
    files.remove_tree(join_path(in_flight.root, name));
    return {};
  });
}

}  // namespace

std::optional<std::string> keep_newest(FileSystem& files, const CheckpointInFlight& in_flight,
                                       size_t keep) {
  std::string left;
  try {
    size_t kept = 1;
    for (const int64_t number : step_numbers(files, in_flight.root)) {
      if (number == in_flight.step) continue;
      if (kept < keep) {
        const auto examined = examine_checkpoint(files, in_flight.root, number);
        if (examined && std::holds_alternative<RunCheckpoint>(*examined)) ++kept;
        continue;
      }
      // A checkpoint of a save that ran at the same time: its own retention, or a later one,
      // decides.
      const auto before = in_flight.committed.find(number);
      if (before == in_flight.committed.end()) continue;
      if (before->second.empty()) {
        left += fmt::format("; {} could not be read when the save began", step_name(number));
        continue;
      }
      if (committed_uuid(files, join_path(in_flight.root, step_name(in_flight.step))) !=
          in_flight.uuid) {
        left += fmt::format("; {} is no longer the one of this save", step_name(in_flight.step));
        break;
      }
      const std::string why =
          remove_checkpoint(files, in_flight, step_name(number), before->second);
      if (!why.empty()) left += fmt::format("; {}: {}", step_name(number), why);
    }
  } catch (const Error& error) {
    left += fmt::format("; {}", error.what());
  }
  if (left.empty()) return std::nullopt;
  return fmt::format("old checkpoints could not be removed: {}", left.substr(2));
}

namespace {

// Whether a name in flight is a dead process's.
class LeftOver {
 public:
  LeftOver(FileSystem& files, const CheckpointInFlight& in_flight,
           const std::function<bool(const SaveOwner&)>& is_dead)
      : files_(files),
        root_(in_flight.root),
        owners_(files, in_flight.root, in_flight.owner, is_dead) {}

  bool is_directory_dead(const std::string& name) {
    const auto seen = files_.look_at(join_path(join_path(root_, name), kOwnerFile));
    if (seen && owners_.of_file(*seen) == Life::dead) return true;
    // A save that was killed before it wrote the record, or after it removed the file.
    const bool has_only_name = !seen || (seen->lock == LockState::free && !parse_owner(seen->text));
    return has_only_name && is_name_dead(name, kPartialPrefix);
  }

  // A new `latest` is written within milliseconds. If its process lives, it only loses this file.
  bool is_latest_dead(const std::string& name) {
    if (!owner_in(name, kLatestPrefix)) return false;
    if (is_name_dead(name, kLatestPrefix)) return true;
    const auto seen = files_.look_at(join_path(root_, name));
    return seen && owners_.is_old(*seen);
  }

 private:
  bool is_name_dead(const std::string& name, std::string_view prefix) {
    const std::optional<SaveOwner> owner = owner_in(name, prefix);
    return owner && owners_.of_name(*owner) == Life::dead;
  }

  FileSystem& files_;
  const std::string root_;
  OwnerCheck owners_;
};

// Whether remove_by_trash has given this name: a user may call something else .trash-step-1.
bool is_trash(std::string_view name) {
  if (!name.starts_with(kTrashPrefix)) return false;
  name.remove_prefix(kTrashPrefix.size());
  constexpr size_t kUuidDigits = 32;
  return name.size() == kUuidDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

std::vector<std::string> remove_leftovers(FileSystem& files, const CheckpointInFlight& in_flight,
                                          const std::function<bool(const SaveOwner&)>& is_dead) {
  std::vector<std::string> warnings;
  try {
    LeftOver left(files, in_flight, is_dead);
    for (const std::string& name : files.list(in_flight.root)) {
      if (name == base_name(in_flight.directory)) continue;
      const bool is_in_flight = name.starts_with(kPartialPrefix);
      const bool is_new_latest = name.starts_with(kLatestPrefix);
      if (!is_in_flight && !is_new_latest && !is_trash(name)) continue;
      if (is_in_flight && !left.is_directory_dead(name)) {
        warnings.push_back(fmt::format("{} of another save is left over or in flight", name));
      } else if (!is_new_latest || left.is_latest_dead(name)) {
        const std::string why = remove_leftover(files, in_flight, name);
        if (!why.empty()) warnings.push_back(fmt::format("{} was not removed: {}", name, why));
      }
    }
  } catch (const Error& error) {
    warnings.push_back(fmt::format("leftovers could not be removed: {}", error.what()));
  }
  return warnings;
}

}  // namespace modicum
