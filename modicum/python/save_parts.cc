// One rank's part of a save: SaveParts, of TensorsToSave and StateToSave.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"
#include "modicum/training/training.h"

namespace modicum::python {
namespace {

// The heap that glibc's malloc maps for a thread, as long as it does not grow.
constexpr uint64_t kThreadHeapBytes = 132 * kKiB;

using StateArgument = std::variant<PythonStateShards, PythonTensors>;
using RankAndRanks = std::pair<int, int>;

PythonSaveParts parts_of(const PythonTensors& model, const std::optional<StateArgument>& state,
                         const std::string& facts) {
  PythonSaveParts parts{model, {}, facts};
  if (!state) return parts;
  std::visit([&parts](const auto& part) { parts.state = part; }, *state);
  return parts;
}

SaveNeeds needs_of(const PythonTensors& tensors, int threads) {
  SaveNeeds needs = tensors.save->needs();
  needs.footprint[Purpose::staging] += tensors.fetching_bytes(threads);
  return needs;
}

SaveNeeds needs_of(const PythonStateShards& shards, bool is_in_background) {
  SaveNeeds needs{shards.state->files.footprint()};
  if (is_in_background) needs.footprint[Purpose::staging] += kSnapshotStagingBytes;
  return needs;
}

std::vector<SaveNeeds> needs_of(const PythonSaveParts& parts, int threads, bool is_in_background) {
  std::vector<SaveNeeds> needs{needs_of(parts.model, threads)};
  if (const auto* shards = std::get_if<PythonStateShards>(&parts.state)) {
    needs.push_back(needs_of(*shards, is_in_background));
  } else if (const auto* tensors = std::get_if<PythonTensors>(&parts.state)) {
    needs.push_back(needs_of(*tensors, threads));
  }
  return needs;
}

uint64_t gather_bytes_of(const PythonSaveParts& parts) {
  uint64_t bytes = 0;
  for (const SaveNeeds& part : needs_of(parts, 1, false))
    bytes = std::max(bytes, part.gather_bytes);
  return bytes;
}

// Throws UNSUPPORTED if a reader would refuse manifest.json or a text as too long.
void require_recordable(const PythonSaveParts& parts,
                        const std::vector<std::pair<std::string, std::string>>& texts,
                        std::vector<std::string> others) {
  require_readable(parts.facts.size(), kStateFile);
  for (const auto& [name, text] : texts) {
    require_readable(text.size(), name);
    others.push_back(name);
  }
  modicum::require_recordable(parts.model.save->plan, parts.state_manifest(), others);
}

uint64_t create_files_of(const PythonSaveParts& parts, const RankAndRanks& rank_of,
                         CallerBoard& board, const PartialCheckpoint& to) {
  PosixFileSystem files;
  return without_the_lock([&] {
    const FileShare which{rank_of.first, rank_of.second};
    const Manifest& model = parts.model.save->plan.manifest();
    uint64_t written = create_files(model, {files, to.directory}, board, which);
    if (const Manifest* const state = parts.state_manifest()) {
      const std::string directory = to.state_directory();
      written += create_files(*state, {files, directory}, board, which);
    }
    return written;
  });
}

// The parts with their memory on one rank; `python_parts` must stay alive.
class RankParts {
 public:
  RankParts(const PythonSaveParts& python_parts, int rank, int threads)
      : model_(python_parts.model.save->plan.plan(), rank, python_parts.model.arrays,
               python_parts.model.fetch),
        parts_{tensors_of(python_parts.model, model_, threads), {}} {
    if (const auto* state = std::get_if<PythonStateShards>(&python_parts.state)) {
      shards_.emplace(state->shards, numels_of(state->state->parameters));
      parts_.state.emplace<StateToSave>(StateToSave{state->state->files, *shards_});
    } else if (const auto* tensors = std::get_if<PythonTensors>(&python_parts.state)) {
      state_.emplace(tensors->save->plan.plan(), rank, tensors->arrays, tensors->fetch);
      parts_.state.emplace<TensorsToSave>(tensors_of(*tensors, *state_, threads));
    }
  }
  RankParts(const RankParts&) = delete;
  RankParts& operator=(const RankParts&) = delete;

  const SaveParts& parts() const noexcept { return parts_; }

  // Calls `fn` for the span of each buffer, and of each shard of AdamW's state.
  void for_each_memory(FunctionRef<void(std::span<std::byte>)> fn) {
    cover(parts_.model, fn);
    if (const auto* tensors = std::get_if<TensorsToSave>(&parts_.state)) cover(*tensors, fn);
    for_each_span([&fn](const StoredSpan& span) { fn(span.bytes); });
  }
  void expect_in(Snapshot& snapshot, int rank) {
    expect_writes(snapshot, parts_.model.plan, rank, parts_.model.from);
    if (const auto* tensors = std::get_if<TensorsToSave>(&parts_.state)) {
      expect_writes(snapshot, tensors->plan, rank, tensors->from);
    }
    for_each_span([&snapshot](const StoredSpan& span) {
      snapshot.expect({span.bytes.data(), span.bytes.size()});
    });
  }

 private:
  static TensorsToSave tensors_of(const PythonTensors& tensors, Sink& from, int threads) {
    return {tensors.save->loaded->checkpoint(), tensors.save->plan, from, threads};
  }
  static void cover(const TensorsToSave& tensors, FunctionRef<void(std::span<std::byte>)> fn) {
    for (uint32_t b = 0; b < buffer_count(tensors.plan.plan()); ++b) fn(tensors.from.host(b));
  }
  void for_each_span(FunctionRef<void(const StoredSpan&)> fn) {
    const auto* const state = std::get_if<StateToSave>(&parts_.state);
    if (state != nullptr) state->files.for_each_span(state->shards, fn);
  }

  CallerTensors model_;
  std::optional<CallerTensors> state_;
  std::optional<PythonShards> shards_;
  SaveParts parts_;
};

std::shared_ptr<Snapshot> snapshot_of(const PythonSaveParts& python_parts, uint64_t window,
                                      int rank) {
  auto snapshot = std::make_shared<Snapshot>(window);
  RankParts parts(python_parts, rank, 1);
  parts.for_each_memory([&](std::span<std::byte> memory) { snapshot->cover(memory); });
  without_the_lock([&] {
    snapshot->lay_out();
    parts.expect_in(*snapshot, rank);
  });
  return snapshot;
}

nb::dict write(const PythonSaveParts& python_parts, int rank, CallerBoard& board,
               const std::shared_ptr<Ledger>& ledger, const PartialCheckpoint& to, int threads,
               const std::shared_ptr<Snapshot>& snapshot, Gather* gather) {
  checked_rank(rank, python_parts.model.save->plan.plan().ranks());
  const RankParts parts(python_parts, rank, threads);
  PosixFileSystem files;
  if (!snapshot) board.set_thread();
  const SaveOutcome saved = without_the_lock([&] {
    const RankContext at{rank, &board, nullptr, ledger.get(), gather};
    return save_parts(parts.parts(), files, to, at, snapshot.get());
  });
  return dict_of("written_bytes"_a = saved.written_bytes, "read_bytes"_a = saved.read_bytes,
                 "gathered_bytes"_a = saved.gathered_bytes);
}

void define_parts(nb::module_& module) {
  nb::class_<PythonTensors>(module, "TensorsToSave", R"(The tensors of a SavePlan on one rank.

Args:
    plan: the plan.
    given: host memory by target, which the caller must keep alive until the save has ended.
    fetch: `fetch(target, at, view)` fills `view` with the elements of any other target, from `at`
        on; on any thread.)")
      .def(
          "__init__",
          [](PythonTensors* self, std::shared_ptr<MadeSave> plan, nb::dict arrays,
             nb::object fetch) {
            new (self) PythonTensors{std::move(plan), std::move(arrays), std::move(fetch)};
          },
          "plan"_a, "given"_a = nb::dict(), "fetch"_a = nb::none())
      .def_ro("plan", &PythonTensors::save);
  nb::class_<PythonStateShards>(module, "StateToSave", R"(The state of AdamW on one rank.

Args:
    files: the files of all ranks.
    held: the shards of which this rank holds the first replica.)")
      .def(nb::init<std::shared_ptr<MadeState>, std::vector<PythonHeldShard>>(), "files"_a,
           "held"_a);
  nb::class_<PartialCheckpoint>(module, "PartialCheckpoint",
                                "Where the ranks write: `directory` and `point` of rank 0's "
                                "CheckpointSave, the directory with its links resolved.")
      .def(nb::init<std::string, uint64_t>(), "directory"_a, "point"_a)
      .def_ro("directory", &PartialCheckpoint::directory);
}

}  // namespace

uint64_t PythonTensors::fetching_bytes(int threads) const noexcept {
  if (fetch.is_none()) return 0;
  const int workers = std::min(std::max(1, threads), save->plan.plan().staging.workers);
  return static_cast<uint64_t>(workers) * (kThreadBytes + kThreadHeapBytes);
}

const Manifest* PythonSaveParts::state_manifest() const noexcept {
  if (const auto* shards = std::get_if<PythonStateShards>(&state)) {
    return &shards->state->files.manifest();
  }
  const auto* const tensors = std::get_if<PythonTensors>(&state);
  return tensors != nullptr ? &tensors->save->plan.manifest() : nullptr;
}

void define_save_parts(nb::module_& module) {
  define_parts(module);
  nb::class_<PythonSaveParts>(module, "SaveParts", R"(What one rank writes in a save.

Args:
    model: the model's tensors.
    state: those of the optimizer's state; None: it has none.
    facts: the text of state.json.)")
      .def(nb::new_(&parts_of), "model"_a, "state"_a = nb::none(), "facts"_a = "")
      .def_ro("facts", &PythonSaveParts::facts)
      .def(
          "held",
          [](const PythonSaveParts& self, int threads, bool background, uint64_t own_bytes) {
            const Manifest* const state = self.state_manifest();
            const uint64_t record = record_bytes(self.model.save->plan.manifest()) +
                                    (state != nullptr ? record_bytes(*state) : 0);
            return by_purpose(
                save_footprint(needs_of(self, threads, background), own_bytes, record));
          },
          "threads"_a = 1, "background"_a = false, "own_bytes"_a = 0,
          "The bytes by purpose that the save holds on this rank, without the tensors. `threads`: "
          "as for `write`; `background`: whether it reads through a Snapshot; `own_bytes`: of the "
          "rank's file of a program's own values.")
      .def_prop_ro("gather_bytes", gather_bytes_of,
                   "Bytes of each rank's part of a SharedGather; 0: the save has none.")
      .def("require_recordable", require_recordable, "texts"_a, "others"_a,
           "Raises UsageError (UNSUPPORTED) if a file of the checkpoint would be too long to be "
           "read again. `texts`: (name, text) of further files; `others`: names of the files that "
           "ranks write.")
      .def("create_files", create_files_of, "rank_of"_a, "board"_a, "partial"_a,
           "Creates one rank's share of the files; returns the bytes written. `rank_of`: (rank, "
           "number of ranks).")
      .def("snapshot", snapshot_of, "window"_a, "rank"_a,
           "The Snapshot for a save in the background. `window`: the most bytes of copied blocks. "
           "A block is copied if a step overwrites it before the save has read it.")
      .def("write", write, "rank"_a, "board"_a, "ledger"_a, "partial"_a, nb::kw_only(),
           "threads"_a = 1, "snapshot"_a.none() = nb::none(), "gather"_a.none() = nb::none(),
           "Writes the tensors, first the model's; returns a dict with written_bytes, read_bytes "
           "and gathered_bytes. With a `snapshot` it may run on any thread, takes the GIL only for "
           "tensors that are fetched, and does not wait for other ranks: all must have called "
           "`create_files`, then waited in a barrier. `gather`: see Gather.");
}

}  // namespace modicum::python
