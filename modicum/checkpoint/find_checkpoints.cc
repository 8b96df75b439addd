// Finds the checkpoints of a root, and sets damaged ones aside.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/run.h"

namespace modicum {

std::vector<int64_t> step_numbers(FileSystem& files, const std::string& root) {
  std::vector<int64_t> numbers;
  for (const std::string& name : files.list(root)) {
    if (const auto step = step_of(name)) numbers.push_back(*step);
  }
  std::sort(numbers.rbegin(), numbers.rend());
  return numbers;
}

std::optional<std::variant<RunCheckpoint, SkippedCheckpoint>> examine_checkpoint(
    FileSystem& files, const std::string& root, int64_t step) {
  const std::string path = join_path(root, step_name(step));
  try {
    RunCheckpoint found = check_run_checkpoint(files, path);
    if (found.step == step) return found;
    fail(Category::integrity, "the directory has the record of another checkpoint",
         {.expected = step_name(step), .got = step_name(found.step)});
  } catch (const Error& error) {
    if (!files.entry(path)) return std::nullopt;
    if (!is_damage(error.category())) throw;
    return SkippedCheckpoint{step, error.what()};
  }
}

FoundCheckpoints find_checkpoints(FileSystem& files, const std::string& root, size_t most,
                                  std::optional<int64_t> before) {
  FoundCheckpoints checkpoints;
  for (const int64_t number : step_numbers(files, root)) {
    if (checkpoints.found.size() == most) break;
    if (before && number >= *before) continue;
    auto examined = examine_checkpoint(files, root, number);
    if (!examined) {
      checkpoints.was_one_removed = true;
    } else if (auto* const found = std::get_if<RunCheckpoint>(&*examined)) {
      checkpoints.found.push_back(std::move(*found));
    } else {
      checkpoints.skipped.push_back(std::get<SkippedCheckpoint>(std::move(*examined)));
    }
  }
  return checkpoints;
}

RunCheckpoint newest_checkpoint(FileSystem& files, const std::string& root,
                                std::vector<SkippedCheckpoint>& skipped) {
  std::optional<int64_t> before;
  if (!skipped.empty()) before = skipped.back().step;
  FoundCheckpoints checkpoints = find_checkpoints(files, root, 1, before);
  // The process that has removed one may have saved a newer one before.
  if (checkpoints.was_one_removed) checkpoints = find_checkpoints(files, root, 1, before);
  if (checkpoints.was_one_removed) {
    fail(Category::io, "checkpoints are removed while they are read", {.file = base_name(root)});
  }
  std::move(checkpoints.skipped.begin(), checkpoints.skipped.end(), std::back_inserter(skipped));
  if (!checkpoints.found.empty()) return std::move(checkpoints.found.front());
  if (skipped.empty()) {
    fail(Category::uncommitted, "no checkpoint has been saved here",
         {.file = base_name(root),
          .expected = "a directory step-N in it (of accelerate: the path of one checkpoint)"});
  }
  fail(Category::uncommitted,
       fmt::format("none of {} is intact; {}: {}", counted(skipped.size(), "checkpoint"),
                   step_name(skipped.front().step), skipped.front().reason),
       {.file = base_name(root)});
}

std::optional<int64_t> damaged_step_of(std::string_view name) {
  if (!name.starts_with(kDamagedPrefix)) return std::nullopt;
  name.remove_prefix(kDamagedPrefix.size());
  return step_of(fmt::format("step-{}", name.substr(0, name.find('-'))));
}

uint64_t bytes_below(FileSystem& files, const std::string& directory) {
  uint64_t bytes = 0;
  std::vector<std::string> directories = {directory};
  while (!directories.empty()) {
    const std::string at = std::move(directories.back());
    directories.pop_back();
    for (const std::string& name : files.list(at)) {
      const std::string path = join_path(at, name);
      const std::optional<DirectoryEntry> entry = files.entry(path);
      if (!entry) continue;
      if (entry->is_directory) directories.push_back(path);
      if (entry->is_regular) bytes += entry->size_bytes;
    }
  }
  return bytes;
}

DamagedCheckpoint set_aside(FileSystem& files, const std::string& root, SkippedCheckpoint damaged,
                            const std::optional<std::string>& uuid) {
  const std::string real_root = files.real_path(root);
  const std::string path = join_path(real_root, step_name(damaged.step));
  const std::string name = fmt::format("{}{}-{}", kDamagedPrefix, damaged.step, make_uuid());
  const std::string to = join_path(real_root, name);
  DamagedCheckpoint aside{.step = damaged.step, .reason = std::move(damaged.reason)};
  aside.path = join_path(root, name);
  aside.bytes = bytes_below(files, path);
  files.rename_new(path, to);
  try {
    if (committed_uuid(files, to) != uuid) {
      fail(Category::conflict, "another process has replaced the damaged checkpoint",
           {.file = step_name(damaged.step)});
    }
  } catch (const Error&) {
    files.rename_new(to, path);
    throw;
  }
  return aside;
}

}  // namespace modicum
