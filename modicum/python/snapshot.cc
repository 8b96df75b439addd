// Saves in the background: Snapshot, and create_files, which every rank must call first.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <utility>
#include <vector>

#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"

namespace modicum::python {
namespace {

uint64_t create_files_of(const Manifest& manifest, const std::pair<int, int>& rank_of,
                         CallerBoard& board, const std::string& directory) {
  PosixFileSystem files;
  return without_the_lock([&] {
    return create_files(manifest, {files, directory}, board, {rank_of.first, rank_of.second});
  });
}

// Arguments from Python: (plan, given) of each save_tensors, and (files, held) of each save_state.
using WrittenTensors = std::vector<std::pair<std::shared_ptr<MadeSave>, nb::dict>>;
using WrittenStates =
    std::vector<std::pair<std::shared_ptr<MadeState>, std::vector<PythonHeldShard>>>;

std::shared_ptr<Snapshot> snapshot_of(uint64_t window, int rank, const WrittenTensors& tensors,
                                      const WrittenStates& states) {
  auto snapshot = std::make_shared<Snapshot>(window);
  std::deque<CallerTensors> sinks;  // a deque: elements must not move
  for (const auto& [python_save, arrays] : tensors) {
    const Plan& plan = python_save->plan.plan();
    CallerTensors& sink = sinks.emplace_back(plan, rank, arrays, nb::none());
    for (uint32_t b = 0; b < buffer_count(plan); ++b) snapshot->cover(sink.host(b));
  }
  const auto for_each_span = [&](FunctionRef<void(const StoredSpan&)> fn) {
    for (const auto& [python_state, shards] : states) {
      python_state->files.for_each_span(PythonShards(shards, numels_of(python_state->parameters)),
                                        fn);
    }
  };
  for_each_span([&](const StoredSpan& span) { snapshot->cover(span.bytes); });
  without_the_lock([&] {
    snapshot->lay_out();
    for (size_t i = 0; i < tensors.size(); ++i) {
      expect_writes(*snapshot, tensors[i].first->plan, rank, sinks[i]);
    }
    for_each_span([&](const StoredSpan& span) {
      snapshot->expect({span.bytes.data(), span.bytes.size()});
    });
  });
  return snapshot;
}

}  // namespace

void define_snapshot(nb::module_& module) {
  module.attr("SNAPSHOT_STAGING_BYTES") = kSnapshotStagingBytes;
  nb::class_<Snapshot>(module, "Snapshot",
                       R"(The values that one rank's save in the background reads.

With a snapshot, save_tensors and save_state may run on any thread, take the GIL only for tensors on
a device, and do not wait for other ranks. All ranks must have called create_files, then waited in a
barrier.

Args:
    window: the most bytes of copied blocks. A block is copied if a step overwrites it before the
        save has read it.
    rank: this rank.
    tensors: (plan, given) of each save_tensors. The caller must keep `given` alive until `end`.
    states: (files, held) of each save_state.)")
      .def(nb::new_(&snapshot_of), "window"_a, "rank"_a, "tensors"_a, "states"_a)
      .def_prop_ro("bytes", &Snapshot::bytes,
                   "The bytes that `charge` charges, with purpose `snapshot`.")
      .def(
          "charge",
          [](Snapshot& self, const std::shared_ptr<Ledger>& ledger) { self.charge(*ledger); },
          "ledger"_a, nb::keep_alive<1, 2>(),
          "Charges the window and its tables. Raises BudgetError if the ledger's limit is too low.")
      .def(
          "keep",
          [](Snapshot& self, nb::handle array) {
            return self.keep(bytes_of_array(writable(array, "")));
          },
          "memory"_a,
          "Immediately copies the values in `memory` that the save has yet to read. Returns False "
          "if the window is too small.")
      .def(
          "end", [](Snapshot& self) { without_the_lock([&] { self.end(); }); },
          "Declares that nothing more is read, and gives the window back.")
      .def_prop_ro(
          "waited_s",
          [](const Snapshot& self) { return static_cast<double>(self.waited_ns()) / kNsPerSecond; },
          "Seconds in which at least one thread of a step waited for the save to read.")
      .def_prop_ro("copied_bytes", &Snapshot::copied_bytes, "Bytes copied to the window.");
  module.def(
      "create_files",
      [](const MadeSave& self, const std::pair<int, int>& rank_of, CallerBoard& board,
         const std::string& directory) {
        return create_files_of(self.plan.manifest(), rank_of, board, directory);
      },
      "plan"_a, "rank_of"_a, "board"_a, "directory"_a,
      "Creates one rank's share of the files of a save; returns the bytes written. `rank_of`: "
      "(rank, number of ranks).");
  module.def(
      "create_files",
      [](const MadeState& self, const std::pair<int, int>& rank_of, CallerBoard& board,
         const std::string& directory) {
        return create_files_of(self.files.manifest(), rank_of, board, directory);
      },
      "files"_a, "rank_of"_a, "board"_a, "directory"_a,
      "Creates one rank's share of the files of AdamW's state; returns the bytes written.");
}

}  // namespace modicum::python
