// Removes old steps, and what dead processes have left in flight.
#include <fmt/format.h>

#include "modicum/base/base.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/step.h"

namespace modicum {

void remove_by_trash(FileSystem& files, const std::string& root, const std::string& name) {
  const std::string trash = join_path(root, std::string(kTrashPrefix) + make_uuid());
  files.rename(join_path(root, name), trash);
  files.sync_directory(root);
  files.remove_tree(trash);
}

namespace {

// Removes a name of the step's root if the save's user owns it. Returns why it stays; empty if it
// is removed, be it by another process.
std::string remove_owned(FileSystem& files, const StepInFlight& step, const std::string& name,
                         FunctionRef<void(const DirectoryEntry&)> removal) {
  const std::string path = join_path(step.root, name);
  try {
    const std::optional<DirectoryEntry> entry = files.entry(path);
    if (!entry) return {};
    if (entry->owner != step.user) return fmt::format("user {} owns it", entry->owner);
    removal(*entry);
  } catch (const Error& error) {
    if (!is_listed(files, step.root, name)) return {};
    return error.what();
  }
  return {};
}

// Removes a step that was committed with this uuid when `step` began. If it has been replaced
// since, its own save decides.
std::string remove_step(FileSystem& files, const StepInFlight& step, const std::string& name,
                        const std::string& uuid) {
  return remove_owned(files, step, name, [&](const DirectoryEntry& entry) {
    if (committed_uuid(files, join_path(step.root, name)) != uuid) return;
    // A link to a step elsewhere: removing it is one step, and what it names stays.
    if (entry.is_link) return files.remove(join_path(step.root, name));
    remove_by_trash(files, step.root, name);
  });
}

std::string remove_leftover(FileSystem& files, const StepInFlight& step, const std::string& name) {
  return remove_owned(files, step, name, [&](const DirectoryEntry& entry) {
    // No save makes one: somebody else did.
    if (entry.is_link) fail(Category::conflict, "a symbolic link", {.file = name});
    if (name.starts_with(kPartialPrefix)) return remove_by_trash(files, step.root, name);
    files.remove_tree(join_path(step.root, name));
  });
}

}  // namespace

std::optional<std::string> keep_newest(FileSystem& files, const StepInFlight& step, size_t keep) {
  std::string left;
  try {
    size_t kept = 1;
    for (const int64_t number : step_numbers(files, step.root)) {
      if (number == step.step) continue;
      if (kept < keep) {
        const auto examined = examine_step(files, step.root, number);
        if (examined && std::holds_alternative<FoundStep>(*examined)) ++kept;
        continue;
      }
      // A step of a save that ran at the same time: its own retention, or a later one, decides.
      const auto before = step.committed.find(number);
      if (before == step.committed.end()) continue;
      if (committed_uuid(files, join_path(step.root, step_name(step.step))) != step.uuid) {
        left += fmt::format("; {} is no longer the one of this save", step_name(step.step));
        break;
      }
      const std::string why = remove_step(files, step, step_name(number), before->second);
      if (!why.empty()) left += fmt::format("; {}: {}", step_name(number), why);
    }
  } catch (const Error& error) {
    left += fmt::format("; {}", error.what());
  }
  if (left.empty()) return std::nullopt;
  return fmt::format("old steps could not be removed: {}", left.substr(2));
}

std::vector<std::string> remove_leftovers(FileSystem& files, const StepInFlight& step,
                                          const std::function<bool(const StepOwner&)>& is_dead) {
  const auto stays = [&](std::string_view name, std::string_view prefix) {
    const std::optional<StepOwner> owner = owner_in(name, prefix);
    return !owner || !is_dead(*owner);
  };
  std::vector<std::string> warnings;
  try {
    for (const std::string& name : files.list(step.root)) {
      if (name == base_name(step.directory)) continue;
      const bool is_in_flight = name.starts_with(kPartialPrefix);
      const bool is_new_latest = name.starts_with(kLatestPrefix);
      if (!is_in_flight && !is_new_latest && !name.starts_with(kTrashPrefix)) continue;
      if (is_in_flight && stays(name, kPartialPrefix)) {
        warnings.push_back(fmt::format("{} of another save is left over or in flight", name));
      } else if (!is_new_latest || !stays(name, kLatestPrefix)) {
        const std::string why = remove_leftover(files, step, name);
        if (!why.empty()) warnings.push_back(fmt::format("{} was not removed: {}", name, why));
      }
    }
  } catch (const Error& error) {
    warnings.push_back(fmt::format("leftovers could not be removed: {}", error.what()));
  }
  return warnings;
}

}  // namespace modicum
