// The state of AdamW in files: writing it, reading it, and its state.json.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum::python {
namespace {

std::vector<StateOf> states_of(const std::vector<PythonStoredState>& written) {
  std::vector<StateOf> states;
  for (const auto& [fqn, dtype, shape, format, is_master] : written) {
    const StateFormatRow& row = row_named("state format", format, all_state_formats());
    states.push_back({spec_of(fqn, dtype, shape), row.format, is_master});
  }
  return states;
}

std::shared_ptr<MadeState> state_files(const std::vector<PythonStoredState>& parameters) {
  return std::make_shared<MadeState>(MadeState{parameters, StateFiles(states_of(parameters))});
}

void require_state(const OpenCheckpoint& from, const std::vector<PythonStoredState>& parameters,
                   bool has_masters) {
  StateFiles(from.checkpoint.manifest, has_masters).require_of(states_of(parameters));
}

nb::dict load_state(const OpenCheckpoint& from, const std::string& facts,
                    const std::vector<PythonStoredState>& parameters, int rank, CallerBoard& board,
                    const std::shared_ptr<Ledger>& ledger,
                    const std::vector<PythonHeldShard>& written_shards, bool has_masters) {
  const PythonShards shards(written_shards, numels_of(parameters));
  const Manifest& manifest = from.checkpoint.manifest;
  const StateFiles files(manifest, has_masters);
  const StateFacts parsed = parse_state(facts);
  const std::vector<StateOf> states = states_of(parameters);
  files.require_of(states);
  board.set_thread();
  ComparedChunks compared(manifest, kStateFolder);
  const uint64_t read = without_the_lock([&] {
    const ReportedPhase phase(ledger->reporter(), "resume");
    const Footprint needed = resume_footprint_of(manifest, files, states);
    const Charge header = ledger->adopt(Purpose::header, needed[Purpose::header]);
    return modicum::load_state({from.checkpoint, files, parsed}, shards,
                               {rank, &board, nullptr, ledger.get()}, compared);
  });
  return dict_of("storage_read_bytes"_a = read, "compared"_a = text_of_compared(compared));
}

std::string state_text(const std::string& format, const nb::int_& seed,
                       const std::vector<std::pair<std::string, int64_t>>& steps,
                       const std::vector<std::string>& without_state) {
  StateFacts facts{.format = state_format_named(format).format,
                   .seed = seed_of(seed),
                   .without_state = without_state};
  // The most frequent step count is stored once; `steps_of` has the parameters with another one.
  std::map<int64_t, size_t> counts;
  for (const auto& [fqn, steps_made] : steps) ++counts[steps_made];
  const auto usual =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (usual != counts.end()) facts.steps = usual->first;
  for (const auto& [fqn, steps_made] : steps) {
    if (steps_made != facts.steps) facts.steps_of[fqn] = steps_made;
  }
  return state_json(facts);
}

nb::dict state_facts(const std::string& text) {
  const StateFacts facts = parse_state(text);
  return dict_of("state_format"_a = std::string(row_of(facts.format).name), "seed"_a = facts.seed,
                 "steps"_a = facts.steps, "steps_of"_a = nb::cast(facts.steps_of),
                 "without_state"_a = nb::cast(facts.without_state));
}

}  // namespace

void define_saved_state(nb::module_& module) {
  nb::class_<PythonStoredState>(module, "StoredState", R"(A parameter whose state is in files.

Args:
    fqn, dtype, shape: of the complete parameter.
    format: of its state.
    is_own_master: whether its memory is the master.)")
      .def(nb::init<std::string, std::string, std::vector<int64_t>, std::string, bool>(), "fqn"_a,
           "dtype"_a, "shape"_a, "format"_a, "is_own_master"_a)
      .def_ro("fqn", &PythonStoredState::fqn)
      .def_ro("dtype", &PythonStoredState::dtype)
      .def_ro("shape", &PythonStoredState::shape)
      .def_ro("format", &PythonStoredState::format)
      .def_ro("is_own_master", &PythonStoredState::is_own_master);
  nb::class_<PythonHeldShard>(module, "HeldShard",
                              "A shard of an AdamW, by its index, and its name in files.")
      .def(nb::init<std::shared_ptr<State>, size_t, std::string>(), "state"_a, "shard"_a, "fqn"_a);
  nb::class_<MadeState>(module, "StateFiles", R"(The tensors of AdamW's state in a checkpoint.

Args:
    parameters: those that have state.)")
      .def(nb::new_(&state_files), "parameters"_a);
  module.def("require_state", require_state, "checkpoint"_a, "parameters"_a, "has_masters"_a = true,
             "Raises UsageError, which names a tensor, unless the checkpoint has the state of "
             "exactly these parameters, in any format. `has_masters`: as for `load_state`.");
  module.def("load_state", load_state, "checkpoint"_a, "facts"_a, "parameters"_a, "rank"_a,
             "board"_a, "ledger"_a, "held"_a, "has_masters"_a = true,
             "Reads one rank's shards of a state that was saved in any format, and sets their step "
             "counts. `facts`: the text of its state.json; `has_masters`: false for the state of "
             "torch's optimizers, which step parameters of 16 bits themselves. The masters must "
             "hold the parameters' loaded values. Returns a dict with storage_read_bytes and "
             "compared (see compared_values). Raises UsageError, which names a tensor, unless the "
             "saved state is that of these parameters.");
  module.attr("CONVERTED_STATE_BYTES") = kConvertedStateBytes;
  module.def("state_text", state_text, "state_format"_a, "seed"_a, "steps"_a, "without_state"_a,
             "The text of AdamW's state.json. `steps`: (fqn, number of steps) each.");
  module.def("state_facts", state_facts, "text"_a,
             "state_format, seed, steps, steps_of and without_state of a state.json.");
}

}  // namespace modicum::python
