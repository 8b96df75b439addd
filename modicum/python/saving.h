// Saves in Python: types that plans, files and snapshots share. Internal to `python`.
#pragma once

#include <fmt/format.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "modicum/python/adamw_state.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum::python {

// A SavePlan and the plan of the load that it inverts.
struct MadeSave {
  MadeSave(std::shared_ptr<MadePlan> load_plan, const SaveForm& form)
      : loaded(std::move(load_plan)), plan(loaded->checkpoint(), loaded->plan, form) {}

  const std::shared_ptr<MadePlan> loaded;
  const SavePlan plan;

  // Bytes of each rank's part of a SharedGather; 0: the save has none.
  uint64_t gather_bytes() const noexcept { return plan.plan().staging.gather_part_bytes; }
  // What a save holds on each rank: both plans and the staging, and a part of the SharedGather.
  SaveNeeds needs() const {
    SaveNeeds needed = plan.needs();
    needed.footprint[Purpose::header] += loaded->plan.manifest->held_bytes();
    needed.footprint[Purpose::plan] += loaded->plan.held_bytes();
    return needed;
  }
};

// By default a save has the same files as the source. If the source has none, files are as large as
// those of an optimizer's state.
inline SaveForm form_of(const Checkpoint& source) {
  SaveForm form;
  if (source.manifest.files.empty()) form.shard_bytes = kStateFileBytes;
  return form;
}

// The caller's tensors: host memory (`arrays`), or tensors whose elements `fetch` copies to the
// host.
class CallerTensors final : public Sink {
 public:
  CallerTensors(const Plan& plan, int rank, const nb::dict& arrays, nb::object fetch)
      : plan_(plan), fetch_(std::move(fetch)), caller_memory_(buffer_count(plan)) {
    for (const auto& [target, array] : arrays) take(nb::cast<size_t>(target), array);
    for (uint32_t b = 0; b < caller_memory_.size(); ++b) require_size(b, rank);
  }

  std::span<std::byte> host(uint32_t buffer) noexcept override {
    return caller_memory_[holder_of(plan_, buffer)];
  }
  void copy(uint32_t buffer, int64_t, std::span<const std::byte>) override {
    fail(Category::internal, "a save writes to no tensor", {.tensor = buffer_name(plan_, buffer)});
  }
  void fetch(uint32_t buffer, int64_t at, std::span<std::byte> elements) override {
    const nb::gil_scoped_acquire acquired;
    fetch_(holder_of(plan_, buffer), at, view_of(elements));
  }

 private:
  void take(size_t buffer, nb::handle array) {
    require_target(buffer, caller_memory_.size());
    arrays_.push_back(writable(array, buffer_name(plan_, static_cast<uint32_t>(buffer))));
    caller_memory_[buffer] = bytes_of_array(arrays_.back());
  }
  void require_size(uint32_t buffer, int rank) const {
    const bool is_given = destination_of(plan_, buffer) == Destination::caller_memory;
    if (!is_given && caller_memory_[holder_of(plan_, buffer)].empty()) return;
    if (holder_of(plan_, buffer) != buffer) return;
    const uint64_t expected = buffer_of(plan_, buffer, rank).bytes();
    if (caller_memory_[buffer].size() == expected) return;
    fail(Category::usage, "the memory given for a tensor has the wrong size",
         {.tensor = buffer_name(plan_, buffer),
          .rank = rank,
          .expected = fmt::format("{} bytes", expected),
          .got = fmt::format("{} bytes", caller_memory_[buffer].size())});
  }

  const Plan& plan_;
  const nb::object fetch_;
  std::vector<AnyArray> arrays_;  // keep the given memory alive
  std::vector<std::span<std::byte>> caller_memory_;
};

// A parameter that has state, as Python passes it.
struct PythonStoredState {
  std::string fqn;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string format;
  bool is_own_master = false;  // its memory is the master
};
// A shard that this rank saves or loads, as Python passes it.
struct PythonHeldShard {
  std::shared_ptr<State> state;
  size_t shard = 0;  // its index in `state`
  std::string fqn;
};

// Visits shards of states. Throws UNSUPPORTED if a shard with 8-bit moments has only a part of a
// block: the ranks that share a block have different scales for it.
class PythonShards {
 public:
  PythonShards(const std::vector<PythonHeldShard>& shards,
               const std::map<std::string, int64_t>& numel_of)
      : shards_(shards) {
    for (const auto& [state, index, fqn] : shards) {
      ShardSpec shard = state->shard(index);
      if (!row_of(state->here().format()).has_scales()) continue;
      shard.fqn = fqn;
      require_whole_blocks(shard, numel_of.at(fqn));
    }
  }
  void operator()(FunctionRef<void(const HeldShard&)> fn) const {
    for (const auto& [state, index, fqn] : shards_) fn({state->adamw, index, fqn});
  }

 private:
  const std::vector<PythonHeldShard>& shards_;
};

inline std::map<std::string, int64_t> numels_of(const std::vector<PythonStoredState>& written) {
  std::map<std::string, int64_t> numels;
  for (const PythonStoredState& state : written) numels[state.fqn] = numel_of(state.shape);
  return numels;
}

// The files of AdamW's state, and the parameters that have this state.
struct MadeState {
  const std::vector<PythonStoredState> parameters;
  const StateFiles files;
};

// The memory of a plan's tensors on one rank, as Python passes it; see CallerTensors.
struct PythonTensors {
  std::shared_ptr<MadeSave> save;
  nb::dict arrays;
  nb::object fetch;

  // Stacks and heaps of the threads that call `fetch`.
  uint64_t fetching_bytes(int threads) const noexcept;
};
// The shards of AdamW that a rank saves.
struct PythonStateShards {
  std::shared_ptr<MadeState> state;
  std::vector<PythonHeldShard> shards;
};
// SaveParts in Python.
struct PythonSaveParts {
  PythonTensors model;
  std::variant<std::monostate, PythonStateShards, PythonTensors> state;
  std::string facts;  // the text of state.json

  // The manifest of the state's tensors; null: there are none.
  const Manifest* state_manifest() const noexcept;
};

void define_saved_state(nb::module_& module);
void define_save_parts(nb::module_& module);
void define_snapshot(nb::module_& module);
void define_run_checkpoints(nb::module_& module);

}  // namespace modicum::python
