// Finds, examines and sets aside saved checkpoints.
#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum::python {
namespace {

nb::dict described(const RunCheckpoint& found) {
  return dict_of("step"_a = found.step, "path"_a = found.path, "uuid"_a = found.record.uuid,
                 "world_size"_a = found.record.world_size,
                 "has_state"_a = !found.record.state.empty());
}

using SkippedCheckpoints = std::vector<std::pair<int64_t, std::string>>;

nb::dict newest(const std::string& root, const SkippedCheckpoints& already) {
  PosixFileSystem files;
  std::vector<SkippedCheckpoint> skipped;
  for (const auto& [step, reason] : already) skipped.push_back({step, reason});
  const RunCheckpoint found =
      without_the_lock([&] { return newest_checkpoint(files, root, skipped); });
  nb::list reasons;
  for (size_t i = already.size(); i < skipped.size(); ++i) {
    reasons.append(dict_of("step"_a = skipped[i].step, "reason"_a = skipped[i].reason));
  }
  nb::dict newest = described(found);
  newest["skipped"] = reasons;
  return newest;
}

// None if `root` has no directory of this name that could be set aside.
std::optional<nb::dict> examined(const std::string& root, int64_t step) {
  PosixFileSystem files;
  const std::string path = join_path(root, fmt::format("step-{}", step));
  OptionalText uuid;
  const auto found = without_the_lock([&]() -> decltype(examine_checkpoint(files, root, step)) {
    const std::optional<DirectoryEntry> entry = files.entry(path);
    if (!entry || !entry->is_directory) return std::nullopt;
    uuid = committed_uuid(files, path);
    return examine_checkpoint(files, root, step);
  });
  if (!found) return std::nullopt;
  const auto* const damaged = std::get_if<SkippedCheckpoint>(&*found);
  return dict_of("path"_a = path, "uuid"_a = uuid,
                 "reason"_a = damaged == nullptr ? "" : damaged->reason);
}

nb::dict put_aside(const std::string& root, int64_t step, const std::string& reason,
                   const OptionalText& uuid) {
  PosixFileSystem files;
  const DamagedCheckpoint damaged = without_the_lock([&] {
    return set_aside(files, root, {step, reason}, uuid);
  });
  return dict_of("step"_a = damaged.step, "path"_a = damaged.path, "reason"_a = damaged.reason,
                 "bytes"_a = damaged.bytes, "warning"_a = warning_of(damaged));
}

// The first damage in one rank's part of a checkpoint; "" if there is none.
std::string fault_of(const std::string& path, int rank, int ranks, CallerBoard& board) {
  PosixFileSystem files;
  board.set_thread();
  return without_the_lock([&]() -> std::string {
    const VerifyPart part{static_cast<uint64_t>(rank), static_cast<uint64_t>(ranks)};
    const auto poll = [&board] {
      if (board.failure()) fail(Category::cancelled, "another rank failed");
    };
    const std::optional<Error> damage = damage_of_checkpoint(files, path, poll, part);
    return damage ? damage->what() : "";
  });
}

nb::dict opened(const std::string& path) {
  PosixFileSystem files;
  return described(without_the_lock([&] { return open_run_checkpoint(files, path); }));
}

nb::dict checked(const std::string& path) {
  PosixFileSystem files;
  return described(without_the_lock([&] { return check_run_checkpoint(files, path); }));
}

}  // namespace

void define_run_checkpoints(nb::module_& module) {
  module.def(
      "newest_checkpoint", newest, "root"_a, "skipped"_a = SkippedCheckpoints(),
      "The newest checkpoint whose headers and other files have the recorded digests, older than "
      "those in `skipped`, (step, reason) each: a dict of step, path, uuid, world_size and "
      "has_state, with `skipped`, the damaged checkpoints that were found now. Raises "
      "IntegrityError (UNCOMMITTED) if there is none.");
  module.def(
      "checkpoint_fault", fault_of, "path"_a, "rank"_a, "ranks"_a, "board"_a,
      "Compares one rank's part of a checkpoint with the recorded digests; all ranks together "
      "compare every byte. Returns the text of the first damage, or an empty text. Raises "
      "IoError if a file can't be read.");
  module.def("open_run_checkpoint", opened, "path"_a,
             "The dict of newest_checkpoint, without `skipped`, for one checkpoint. Raises an "
             "error unless "
             "COMMIT, manifest.json and the lengths of its files are right.");
  module.def("check_run_checkpoint", checked, "path"_a,
             "As open_run_checkpoint, but also compares the digests of headers and other files.");
  module.def("examine_checkpoint", examined, "root"_a, "step"_a,
             "As check_run_checkpoint, for the checkpoint of a root. A dict of path, uuid (None "
             "without a valid "
             "COMMIT) and reason, the damage or an empty text; None if the root has no such "
             "directory.");
  module.def(
      "set_aside", put_aside, "root"_a, "step"_a, "reason"_a, "uuid"_a,
      "Renames a damaged checkpoint, so that a new one can have its number. Returns a dict of "
      "step, path, reason, bytes and the text of a warning. `uuid`: from examine_checkpoint.");
}

}  // namespace modicum::python
