// Saves: SavePlan, Gather, CheckpointSave. A save has the same threads as a load; see bindings.h.
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/python/caller_board.h"
#include "modicum/python/saving.h"
#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum::python {
namespace {

std::shared_ptr<MadeSave> save_plan(const std::shared_ptr<MadePlan>& plan,
                                    const OptionalText& dtype, bool copies_unused,
                                    const std::optional<Size>& shard_size, bool adapters,
                                    bool gathers, const std::vector<uint32_t>& from_first) {
  SaveForm form = form_of(plan->checkpoint());
  form.copies_unused = copies_unused;
  form.gathers = gathers;
  form.from_first.resize(plan->plan.recipe->targets.size());
  for (const uint32_t target : from_first) {
    if (target >= form.from_first.size()) {
      fail(Category::usage, "from_first", {.got = fmt::format("target {}", target)});
    }
    form.from_first[target] = true;
  }
  form.dtype = dtype_flag(dtype.value_or(""));
  form.stem = adapters ? kAdapterStem : kModelStem;
  if (adapters) {  // PEFT reads one file
    form.shard_bytes = UINT64_MAX;
    return without_the_lock([&] { return std::make_shared<MadeSave>(plan, form); });
  }
  if (shard_size) form.shard_bytes = bytes_of(*shard_size);
  return without_the_lock([&] { return std::make_shared<MadeSave>(plan, form); });
}

std::vector<std::string> copied_names(const MadeSave& save) {
  std::vector<std::string> names;
  for (const SavePlan::CopiedTensor& tensor : save.plan.copied()) {
    names.push_back(save.plan.manifest().tensors[tensor.to].spec.fqn);
  }
  return names;
}

uint64_t copied_bytes(const MadeSave& save) {
  uint64_t bytes = 0;
  for (const SavePlan::CopiedTensor& tensor : save.plan.copied()) {
    bytes += save.plan.manifest().tensors[tensor.to].at.bytes();
  }
  return bytes;
}

std::vector<std::string> left_out_names(const MadeSave& save) {
  std::vector<std::string> names;
  for (const uint32_t stored : save.plan.form().left_out) {
    names.push_back(save.loaded->checkpoint().manifest.tensors[stored].spec.fqn);
  }
  return names;
}

using Purposes = std::map<std::string, uint64_t>;

// (promised bytes, limit of the ledger) of each rank. Throws BUDGET if the ranks of a node need
// more than `budget`.
std::vector<std::pair<uint64_t, uint64_t>> save_promise(const Purposes& by_purpose_held,
                                                        const std::vector<uint64_t>& baselines,
                                                        int ranks_per_node,
                                                        const std::optional<uint64_t>& budget,
                                                        const std::string& budget_source) {
  Phase phase{"save", {}};
  for (const uint64_t baseline : baselines) {
    Footprint& of_rank = phase.of_rank.emplace_back(from_purposes(by_purpose_held));
    of_rank[Purpose::process] += baseline;
  }
  Promise promise = make_promise({std::move(phase)}, 0, ranks_per_node);
  promise.launcher_bytes = 0;  // the launcher (torchrun, for example) is not counted
  if (budget) require_fits(promise, {*budget, budget_source});
  std::vector<std::pair<uint64_t, uint64_t>> of_ranks;
  for (int rank = 0; rank < promise.ranks(); ++rank) {
    of_ranks.emplace_back(promise.rank_peak_bytes(rank), promise.ledger_limit_bytes(rank));
  }
  return of_ranks;
}

// The CheckpointSave of the rank that leads the save. `discard` destroys it.
struct CheckpointInSave {
  std::unique_ptr<FileSystem> files = std::make_unique<PosixFileSystem>();
  const std::string root;
  std::optional<CheckpointSave> save;

  CheckpointInSave(const std::string& directory, int64_t step,
                   const std::vector<std::string>& directories, bool inside,
                   std::optional<size_t> keep)
      : root(directory) {
    without_the_lock([&] {
      if (inside) {
        save.emplace(*files, CheckpointSave::OuterDirectory{root}, step);
      } else {
        save.emplace(*files, root, step, false, keep);
      }
      for (const std::string& name : directories) {
        files->make_directory(join_path(save->directory(), name));
      }
    });
  }

  // Returns the CheckpointSave. Throws USAGE after `discard`.
  CheckpointSave& open() {
    if (!save) fail(Category::usage, "the checkpoint was discarded");
    return *save;
  }
};

using WrittenFiles = std::vector<std::pair<std::string, OptionalText>>;
// (key, tokens, model_type, outer_type); see Vocabulary.
using PythonVocabulary = std::tuple<std::string, uint64_t, std::string, std::string>;

nb::dict publish(CheckpointInSave& saving, const PythonSaveParts& parts, const WrittenFiles& more,
                 double lock_limit_s, const std::optional<PythonVocabulary>& vocabulary) {
  std::optional<CheckpointSave::SavedState> saved_state;
  if (const Manifest* const state = parts.state_manifest()) {
    saved_state.emplace(CheckpointSave::SavedState{*state, parts.facts});
  }
  PublishOptions options;
  options.lock_limit_ns = static_cast<int64_t>(lock_limit_s * kNsPerSecond);
  for (const auto& [name, text] : more) options.more.push_back({name, text});
  if (vocabulary) {
    const auto& [key, tokens, model_type, outer_type] = *vocabulary;
    options.vocabulary = Vocabulary{key, tokens, model_type, outer_type};
  }
  const MadeSave& model = *parts.model.save;
  const SavedCheckpoint saved = without_the_lock([&] {
    return saving.open().publish(model.loaded->checkpoint(), model.plan, saved_state, options);
  });
  return dict_of("step"_a = saved.step, "path"_a = saved.path,
                 "written_bytes"_a = saved.written_bytes, "durable"_a = saved.is_durable,
                 "warnings"_a = nb::cast(saved.warnings));
}

void define_gather(nb::module_& module) {
  nb::class_<SharedGather>(
      module, "SharedGather",
      R"(Shared memory in which the ranks of a node collect the short runs of a save.

Runs of several ranks that are neighbours in a file, such as the parts of a tensor's row, are
written together.

Args:
    ranks: number of ranks of the node.
    part_bytes: bytes of each rank's part, `SaveParts.gather_bytes`.

Raises:
    IoError: the kernel refuses.)")
      .def(nb::init<int, uint64_t>(), "ranks"_a, "part_bytes"_a)
      .def_static("open", &SharedGather::open, "address"_a, "ranks"_a, "part_bytes"_a,
                  "Maps the memory that another rank has made. None if it can't be mapped, or if "
                  "the address leads to other memory.")
      .def_prop_ro("address", &SharedGather::address,
                   "For `open`; valid while the maker keeps the object alive.");
  nb::class_<Gather>(module, "Gather", R"(One rank's endpoint of a SharedGather, for one save.

Args:
    place: number of the rank on its node, from 0.
    ledger: is charged for the rank's part.)")
      .def(
          "__init__",
          [](Gather* self, SharedGather& shared, CallerBoard& board, int rank, int place,
             const std::shared_ptr<Ledger>& ledger) {
            new (self) Gather(shared, board, rank, place);
            self->commit(*ledger);
          },
          "shared"_a, "board"_a, "rank"_a, "place"_a, "ledger"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>());
}

void define_save_plan(nb::module_& module) {
  nb::class_<MadeSave>(module, "SavePlan",
                       "The inverse of a load's plan: which bytes each rank writes where.")
      .def_prop_ro("copied", copied_names,
                   "Names of the stored tensors that are copied from the source.")
      .def_prop_ro("copied_bytes", copied_bytes, "Bytes of all copied tensors.")
      .def_prop_ro("left_out", left_out_names,
                   "Names of the stored tensors that are neither saved nor copied.")
      .def_prop_ro(
          "digest",
          [](const MadeSave& self) {
            const Digest& digest = self.plan.plan().inputs;
            return fmt::format("{:016x}{:016x}", digest.high, digest.low);
          },
          "Digest of all inputs: ranks with equal digests write one checkpoint.")
      .def_prop_ro(
          "recipe_text",
          [](const MadeSave& self) {
            return recipe_text(*self.plan.plan().recipe, self.plan.manifest());
          },
          "A recipe.json that makes the same targets from the saved tensors.");
  module.def("make_save_plan", save_plan, "plan"_a, nb::kw_only(), "dtype"_a = nb::none(),
             "copies_unused"_a = true, "shard_size"_a = nb::none(), "adapters"_a = false,
             "gathers"_a = false, "from_first"_a = std::vector<uint32_t>(),
             R"(Inverts the plan of a load.

Args:
    plan: from make_plan, with destinations `given` or `copy`.
    dtype: dtype of the saved tensors that can be cast; None: as loaded.
    copies_unused: whether stored tensors that no target reads are copied.
    shard_size: largest size of a file; None: files as in the source.
    adapters: whether all tensors go into one file, PEFT's adapter_model.safetensors.
    gathers: whether the ranks of a node collect their short runs with a Gather.
    from_first: targets of which the first replica writes all elements; of others the replicas
        divide them.

Raises:
    UsageError: two saved tensors would have the same name, or there is no tensor to save.)");
  module.def("save_promise", save_promise, "held"_a, "baselines"_a, nb::kw_only(),
             "ranks_per_node"_a, "budget"_a = nb::none(), "budget_source"_a = "argument",
             "(promised bytes, limit of the ledger) of each rank. `held`: bytes by purpose that a "
             "save holds on each rank; `baselines`: bytes of each rank's process before it. Raises "
             "BudgetError if the ranks of a node need more than `budget`.");
}

void define_saved_checkpoints(nb::module_& module) {
  nb::class_<CheckpointInSave>(module, "CheckpointSave",
                               R"(A checkpoint that is written and not published yet.

Only the rank that leads the save has one.

Args:
    root: the directory of the run's checkpoints.
    step: the number of the training step: S of ROOT/step-S.
    directories: subdirectories to make: "optimizer", "extra".
    inside: whether `root`, a directory to which others write as well, becomes the checkpoint
        itself. It is not committed until `publish`.
    keep: the number of intact checkpoints to keep, including this one; None: all.

Raises:
    IoError: CONFLICT if the checkpoint exists.)")
      .def(nb::init<const std::string&, int64_t, const std::vector<std::string>&, bool,
                    std::optional<size_t>>(),
           "root"_a, "step"_a, "directories"_a = std::vector<std::string>(), "inside"_a = false,
           "keep"_a = nb::none())
      .def_prop_ro(
          "directory",
          [](CheckpointInSave& saving) {
            return join_path(saving.root, base_name(saving.open().directory()));
          },
          "The directory to which the ranks write. Each rank resolves the links of its path, once: "
          "files are created only at a path without links.")
      .def_prop_ro(
          "point", [](CheckpointInSave& saving) { return saving.open().point(); },
          "The random number with which the ranks prove that each element was written once; "
          "see PartialCheckpoint.")
      .def("publish", publish, "parts"_a, nb::kw_only(), "more"_a = WrittenFiles(),
           "lock_limit_s"_a = kRootLockNs / kNsPerSecond, "vocabulary"_a = nb::none(),
           "Makes the checkpoint durable and visible, then removes old ones. All ranks must have "
           "written. `parts`: this rank's; `more`: (name, text) of further files, text None if a "
           "rank has written the file; `lock_limit_s`: how long it waits for another save that "
           "publishes in the same root; `vocabulary`: (key, tokens, model_type, outer_type) for "
           "config.json if the model's tokens are not those of the source, where `model_type` and "
           "`outer_type` name the config to change.")
      .def(
          "discard",
          [](CheckpointInSave& saving) { without_the_lock([&] { saving.save.reset(); }); },
          "Removes the files, unless the checkpoint was published.");
}

}  // namespace

void define_save(nb::module_& module) {
  define_gather(module);
  define_save_plan(module);
  define_saved_state(module);
  define_snapshot(module);
  define_save_parts(module);
  define_saved_checkpoints(module);
  define_run_checkpoints(module);
}

}  // namespace modicum::python
