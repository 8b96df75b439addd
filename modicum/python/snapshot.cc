// Saves in the background: Snapshot, and the files that are made before.
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

// (plan, given) of each save of tensors; (files, held) of AdamW's state.
using WrittenTensors = std::vector<std::pair<std::shared_ptr<MadeSave>, nb::dict>>;
using WrittenStates = std::vector<std::pair<std::shared_ptr<MadeState>, std::vector<WrittenHeld>>>;

std::shared_ptr<Snapshot> snapshot_of(uint64_t window, int rank, const WrittenTensors& tensors,
                                      const WrittenStates& states) {
  auto snapshot = std::make_shared<Snapshot>(window);
  std::deque<CallerTensors> sinks;  // they do not move
  for (const auto& [made, given] : tensors) {
    const Plan& plan = made->plan.plan();
    CallerTensors& sink = sinks.emplace_back(plan, rank, given, nb::none());
    for (uint32_t b = 0; b < buffer_count(plan); ++b) snapshot->cover(sink.host(b));
  }
  const auto for_each_span = [&](FunctionRef<void(const StoredSpan&)> fn) {
    for (const auto& [made, held] : states) {
      made->files.for_each_span(Held(held, numels_of(made->parameters)), fn);
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

With it save_tensors and save_state run on any thread, take the GIL for tensors on a device only,
and meet no other rank: all ranks have called create_files before, and met.

Args:
    window: bytes of blocks that are copied at most, as steps overwrite them before they are read.
    rank: this one.
    tensors: (plan, given) of each save_tensors. The caller keeps `given` until `end`.
    states: (files, held) of save_state.)")
      .def(nb::new_(&snapshot_of), "window"_a, "rank"_a, "tensors"_a, "states"_a)
      .def_prop_ro("bytes", &Snapshot::bytes, "What `charge` charges as `snapshot`.")
      .def(
          "charge", [](Snapshot& of, const std::shared_ptr<Ledger>& ledger) { of.charge(*ledger); },
          "ledger"_a, nb::keep_alive<1, 2>(), "Charges the window. BudgetError.")
      .def(
          "keep",
          [](Snapshot& of, nb::handle given) {
            return of.keep(bytes_of_array(writable(given, "")));
          },
          "memory"_a, "Copies the values of host memory now; False if the window is too small.")
      .def(
          "end", [](Snapshot& of) { without_the_lock([&] { of.end(); }); },
          "Nothing more is read. Gives the window back.")
      .def_prop_ro(
          "waited_s",
          [](const Snapshot& of) { return static_cast<double>(of.waited_ns()) / kNsPerSecond; },
          "How long steps have waited until their memory was read.")
      .def_prop_ro("copied_bytes", &Snapshot::copied_bytes, "What was copied to the window.");
  module.def(
      "create_files",
      [](const MadeSave& made, const std::pair<int, int>& rank_of, CallerBoard& board,
         const std::string& directory) {
        return create_files_of(made.plan.manifest(), rank_of, board, directory);
      },
      "plan"_a, "rank_of"_a, "board"_a, "directory"_a,
      "Creates the share of rank `rank_of`, (rank, number of ranks), of the files; returns the "
      "bytes written.");
  module.def(
      "create_files",
      [](const MadeState& made, const std::pair<int, int>& rank_of, CallerBoard& board,
         const std::string& directory) {
        return create_files_of(made.files.manifest(), rank_of, board, directory);
      },
      "files"_a, "rank_of"_a, "board"_a, "directory"_a, "The same for AdamW's state.");
}

}  // namespace modicum::python
