// The functions that lead to a plan: open_checkpoint, make_recipe, make_layout, make_plan.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"
#include "modicum/python/saving.h"
#include "modicum/report/report.h"
#include "modicum/runs/runs.h"

namespace modicum::python {
namespace {

// Cuts and shardings as Python passes them: (mesh axes, tensor dim, packed parts, pads), and
// (mesh, cuts).
using WrittenCut = std::tuple<std::vector<int>, int, int, bool>;
using WrittenSharding = std::pair<std::vector<int>, std::vector<WrittenCut>>;

// Bytes that a rank process holds before the load: one number for all ranks, or one for each.
using Baseline = std::variant<Size, std::vector<uint64_t>>;

std::shared_ptr<OpenCheckpoint> open(const std::optional<std::filesystem::path>& path,
                                     bool in_save) {
  auto opened = std::make_shared<OpenCheckpoint>();
  opened->checkpoint.files = opened->files.get();
  if (!path) return opened;  // a checkpoint without tensors
  const Record record = in_save ? Record::in_save : Record::compared;
  without_the_lock(
      [&] { opened->checkpoint = open_checkpoint(*opened->files, path->string(), record); });
  return opened;
}

nb::dict stored_of(const OpenCheckpoint& opened) {
  nb::dict stored;
  for (const StoredTensor& tensor : opened.checkpoint.manifest.tensors) {
    stored[tensor.spec.fqn.c_str()] =
        nb::make_tuple(torch_name(tensor.spec.dtype), tuple_of(tensor.spec.shape));
  }
  return stored;
}

std::shared_ptr<MadeRecipe> recipe(const std::shared_ptr<OpenCheckpoint>& checkpoint,
                                   const OptionalText& text, const OptionalText& dtype,
                                   const OptionalText& keep_fp32, bool untie) {
  RecipeOptions options{.text = text,
                        .untie = untie,
                        .dtype = dtype_flag(dtype.value_or("")),
                        .keep_fp32 = keep_fp32.value_or("")};
  Recipe recipe = make_recipe(checkpoint->checkpoint, std::move(options));
  return std::make_shared<MadeRecipe>(MadeRecipe{checkpoint, std::move(recipe)});
}

nb::list targets_of_recipe(const MadeRecipe& python_recipe) {
  nb::list targets;
  const Recipe& recipe = python_recipe.recipe;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    const TensorSpec& spec = recipe.targets[t].spec;
    nb::object alias_of = nb::none();
    if (recipe.is_alias(t)) {
      alias_of = nb::cast(recipe.targets[recipe.nodes[recipe.targets[t].root].from].spec.fqn);
    }
    const Op op = recipe.nodes[recipe.targets[t].root].op;
    targets.append(dict_of("name"_a = spec.fqn, "dtype"_a = torch_name(spec.dtype),
                           "shape"_a = tuple_of(spec.shape), "alias_of"_a = alias_of,
                           "op"_a = std::string(op_name(op))));
  }
  return targets;
}

std::vector<std::string> unused_of_recipe(const MadeRecipe& python_recipe) {
  std::vector<std::string> names;
  for (const uint32_t stored : python_recipe.recipe.unused) {
    names.push_back(python_recipe.source->checkpoint.manifest.tensors[stored].spec.fqn);
  }
  return names;
}

// What the ledger of `rank` holds in the phase in which it holds most.
Footprint ledger_peak(const Plan& plan, int rank) {
  Footprint peak;
  for (const Phase& phase : plan.promise.phases) {
    Footprint ledger = phase.of_rank[static_cast<size_t>(rank)];
    ledger[Purpose::process] = ledger[Purpose::page_tables] = 0;
    if (ledger.total() >= peak.total()) peak = ledger;
  }
  return peak;
}

// The layout that `--layout` of the command line names.
Layout named_layout(const MadeRecipe& recipe, int ranks, const std::string& layout,
                    const OptionalText& mesh, int shard_dim, const OptionalText& tp_rowwise) {
  const RunFlags flags{.ranks = ranks,
                       .layout = layout,
                       .mesh = mesh.value_or(""),
                       .shard_dim = shard_dim,
                       .tp_rowwise = tp_rowwise.value_or("")};
  return asked_layout(flags, targets_of(recipe.recipe));
}

Sharding sharding_from(const WrittenSharding& written) {
  Sharding sharding{.mesh = {written.first}};
  for (const auto& [axes, dim, packed, pads] : written.second) {
    sharding.cuts.push_back({axes, dim, packed, pads});
  }
  return sharding;
}

Layout sharded_layout(const MadeRecipe& recipe, const std::vector<WrittenSharding>& shardings,
                      const std::vector<uint8_t>& sharding_of) {
  if (shardings.empty() || shardings.size() > UINT8_MAX) {
    fail(Category::unsupported, "the number of different shardings is out of range",
         {.expected = "1 to 255", .got = std::to_string(shardings.size())});
  }
  Layout layout = make_layout("mesh", sharding_from(shardings.front()));
  for (size_t kind = 1; kind < shardings.size(); ++kind) {
    add_kind(layout, sharding_from(shardings[kind]));
  }
  if (sharding_of.size() != recipe.recipe.targets.size()) {
    fail(Category::usage, "sharding_of must have an entry per target",
         {.expected = std::to_string(recipe.recipe.targets.size()),
          .got = std::to_string(sharding_of.size())});
  }
  layout.kind_of = sharding_of;
  for (const uint8_t kind : sharding_of) {
    if (kind < shardings.size()) continue;
    fail(Category::usage, "sharding_of has an index outside of shardings",
         {.expected = fmt::format("0 to {}", shardings.size() - 1), .got = std::to_string(kind)});
  }
  return layout;
}

// A rank's shard of one tensor. Needs no recipe.
struct Shard {
  const Sharding sharding;
  const TensorSpec target;
  const int rank;

  Shard(const WrittenSharding& written, const std::vector<int64_t>& shape, int rank_number)
      : sharding(make_layout("mesh", sharding_from(written)).kinds.front()),
        target{.shape = shape},
        rank(checked_rank(rank_number, sharding.mesh.world_size())) {
    if (!checked_numel(shape))
      fail(Category::usage, "a shape is negative or too large", {.got = shape_text(shape)});
  }

  std::vector<std::pair<int64_t, int64_t>> runs(const std::vector<int>& order) const {
    std::vector<std::pair<int64_t, int64_t>> runs;
    for (const ElementRun& run : runs_of(sharding, target, rank, order)) {
      runs.emplace_back(run.first, run.n);
    }
    return runs;
  }
};

Destination destination_named(const std::string& name) {
  if (name == "cpu") return Destination::cpu;
  if (name == "copy") return Destination::copy;
  if (name == "given") return Destination::caller_memory;
  fail(Category::usage, "unknown destination",
       {.expected = "cpu, copy or given", .got = printable(name)});
}

void take_baseline(const Baseline& baseline, const Layout& layout, PlanOptions& options) {
  if (const auto* const bytes = std::get_if<Size>(&baseline)) {
    options.baseline_bytes = bytes_of(*bytes);
    return;
  }
  options.baseline_of = std::get<std::vector<uint64_t>>(baseline);
  if (options.baseline_of.size() == static_cast<size_t>(layout.world_size())) return;
  fail(Category::usage, "baseline must have an entry per rank",
       {.expected = std::to_string(layout.world_size()),
        .got = std::to_string(options.baseline_of.size())});
}

using Purposes = std::map<std::string, uint64_t>;

// Adds a phase `step` to the promise: the bytes that an optimizer holds on each rank.
void take_after(const std::vector<Purposes>& after, const Layout& layout, PlanOptions& options) {
  if (after.size() != static_cast<size_t>(layout.world_size())) {
    fail(Category::usage, "after must have an entry per rank",
         {.expected = std::to_string(layout.world_size()), .got = std::to_string(after.size())});
  }
  Phase phase{"step", {}};
  for (const Purposes& of_rank : after) phase.of_rank.push_back(from_purposes(of_rank));
  options.after = {phase};
}

// Adds a phase `save` to the promise: a save of the loaded tensors and of the optimizer's state,
// with staging of `staging_bytes`. Adds nothing if they can't be saved.
void promise_save(const std::shared_ptr<MadePlan>& python_plan, const StateFiles& state,
                  uint64_t staging_bytes) {
  PlanOptions options = python_plan->plan.options;
  try {
    const MadeSave saved(python_plan, form_of(python_plan->checkpoint()));
    SaveNeeds model = saved.plan.needs();
    // The load's staging may have been shrunk to the budget; a save's staging is never shrunk.
    model.footprint[Purpose::staging] = round_up(staging_bytes, kPageBytes) - model.gather_bytes;
    const uint64_t record = record_bytes(saved.plan.manifest()) + record_bytes(state.manifest());
    options.save = save_footprint(std::vector{model, SaveNeeds{state.footprint()}}, 0, record);
  } catch (const Error& error) {
    const Category why = error.category();
    if (why == Category::unsupported || why == Category::mismatch) return;
    throw;
  }
  python_plan->plan = make_plan(*python_plan->plan.manifest, *python_plan->plan.recipe,
                                python_plan->plan.layout, options);
}

std::shared_ptr<MadePlan> plan(const std::shared_ptr<MadeRecipe>& recipe, const Layout& layout,
                               const std::string& strategy, std::optional<int> ranks_per_node,
                               const std::vector<std::string>& destinations,
                               const std::optional<Size>& staging,
                               const std::optional<Baseline>& baseline, uint64_t init_bytes,
                               bool caller_sends, const std::optional<Size>& budget,
                               const std::string& budget_source, const std::string& fork,
                               const std::vector<Purposes>& after,
                               const std::shared_ptr<MadeState>& save) {
  PlanOptions options{.strategy = &strategy_named(strategy),
                      .ranks_per_node = ranks_per_node.value_or(0),
                      .init_bytes = init_bytes,
                      .caller_sends = caller_sends,
                      .fork = fork_named(fork)};
  for (const std::string& name : destinations) {
    options.destination_of.push_back(destination_named(name));
  }
  options.staging_bytes = staging ? bytes_of(*staging) : kDefaultStagingBytes;
  if (baseline) take_baseline(*baseline, layout, options);
  if (!after.empty()) take_after(after, layout, options);
  auto result = std::make_shared<MadePlan>();
  result->recipe = recipe;
  without_the_lock([&] {
    result->plan = make_plan(recipe->source->checkpoint.manifest, recipe->recipe, layout, options);
    std::optional<Budget> allowed;
    if (budget) allowed = {bytes_of(*budget), budget_source};
    if (allowed && !staging) result->plan = shrunk_to_fit(std::move(result->plan), *allowed);
    if (save) promise_save(result, save->files, options.staging_bytes);
    if (allowed) require_fits(result->plan.promise, *allowed);
  });
  return result;
}

// For each target: the target that holds its memory, and the size and shape of that memory.
nb::list buffers(const MadePlan& python_plan, int rank) {
  const Plan& plan = python_plan.plan;
  checked_rank(rank, plan.ranks());
  nb::list all;
  for (uint32_t t = 0; t < plan.recipe->targets.size(); ++t) {
    const uint32_t holder = holder_of(plan, t);
    const LocalBuffer local = buffer_of(plan, holder, rank);
    const TensorSpec& spec = plan.recipe->targets[holder].spec;
    const auto shape = plan.layout.is_flat(holder)
                           ? std::vector{local.numel}
                           : local_shape(plan.layout.sharding_of(holder), spec, rank);
    all.append(dict_of("holder"_a = holder, "numel"_a = local.numel,
                       "padded_numel"_a = local.padded_numel, "bytes"_a = local.bytes(),
                       "shape"_a = tuple_of(shape)));
  }
  return all;
}

nb::dict document(const MadePlan& python_plan) {
  return as_dict(without_the_lock([&] {
    PlanReport report{.checkpoint = facts_of(python_plan.checkpoint()),
                      .ranks = python_plan.plan.ranks()};
    const Traffic sent = traffic(python_plan.plan);
    report.strategies.push_back(
        {python_plan.plan.strategy().name, python_plan.plan.promise, sent, sent.needed_bytes});
    return plan_json(report);
  }));
}

std::string digest_text(const MadePlan& python_plan) {
  const Digest& digest = python_plan.plan.inputs;
  return fmt::format("{:016x}{:016x}", digest.high, digest.low);
}

void define_inputs(nb::module_& module) {
  nb::class_<OpenCheckpoint>(module, "Checkpoint", "A checkpoint, its headers read and validated.")
      .def_prop_ro(
          "bytes", [](const OpenCheckpoint& c) { return c.checkpoint.manifest.data_bytes(); },
          "Bytes of tensor data.")
      .def_prop_ro("stored", stored_of,
                   "(dtype, shape) of each stored tensor by name, in the order of the files.")
      .def_prop_ro(
          "warnings",
          [](const OpenCheckpoint& c) {
            nb::list warnings;
            for (const std::string& warning : c.checkpoint.warnings) {
              warnings.append(nb::str(warning.data(), warning.size()));
            }
            return warnings;
          },
          "Warnings about optional parts of the checkpoint that are broken, unused or unusual; one "
          "line each.");
  nb::class_<MadeRecipe>(module, "Recipe",
                         R"(A recipe that belongs to an opened checkpoint, from make_recipe.

make_layout and make_plan take it. modicum.recipes.Recipe is another class: plain data that
belongs to no checkpoint. From that class to this one: make_recipe(checkpoint, recipe.text()).
From this class to that one: write `text` to a file, and modicum.recipes.read_recipe reads it.)")
      .def_prop_ro("targets", targets_of_recipe,
                   "A dict for each target: name, dtype, shape, alias_of (a name or None), op (of "
                   "its last node).")
      .def_prop_ro("unused", unused_of_recipe, "Names of the stored tensors that are not read.")
      .def_prop_ro(
          "text",
          [](const MadeRecipe& self) {
            return recipe_text(self.recipe, self.source->checkpoint.manifest);
          },
          "The text of the recipe as a recipe.json.");
  nb::class_<Layout>(module, "Layout",
                     "Which elements of each target each rank holds, and in which order.")
      .def_prop_ro("ranks", &Layout::world_size, "World size.");
}

void define_plan_class(nb::module_& module) {
  nb::class_<MadePlan>(module, "Plan",
                       "Which bytes each rank reads, where it puts them, and how much it holds.")
      .def_prop_ro(
          "ranks", [](const MadePlan& self) { return self.plan.ranks(); }, "World size.")
      .def_prop_ro(
          "strategy", [](const MadePlan& self) { return std::string(self.plan.strategy().name); },
          "The strategy's name.")
      .def_prop_ro(
          "recipe", [](const MadePlan& self) { return self.recipe; }, "The recipe of the plan.")
      .def_prop_ro(
          "checkpoint",
          [](const MadePlan& self) {
            return std::const_pointer_cast<OpenCheckpoint>(self.recipe->source);
          },
          "The checkpoint of the plan.")
      .def_prop_ro("digest", digest_text,
                   "Digest of all inputs, in hex: ranks with equal digests have equal plans.")
      .def_prop_ro("document", document,
                   "The document of `modicum plan --json`, for this strategy only.")
      .def("buffers", buffers, "rank"_a,
           "A dict for each target: holder (the index of the target that owns the memory: for "
           "an alias, of the target that it names), numel, padded_numel, bytes, shape (of "
           "this rank's part, without padding).")
      .def(
          "promised_bytes",
          [](const MadePlan& self, int rank) {
            return self.plan.promise.rank_peak_bytes(checked_rank(rank, self.plan.ranks()));
          },
          "rank"_a, "The most bytes that the rank's process will hold.")
      .def(
          "ledger_limit_bytes",
          [](const MadePlan& self, int rank) {
            return self.plan.promise.ledger_limit_bytes(checked_rank(rank, self.plan.ranks()));
          },
          "rank"_a, "promised_bytes without the process's baseline and page tables.")
      .def(
          "ledger_peak",
          [](const MadePlan& self, int rank) {
            return by_purpose(ledger_peak(self.plan, checked_rank(rank, self.plan.ranks())));
          },
          "rank"_a, "ledger_limit_bytes by purpose.")
      .def(
          "exchange_group",
          [](const MadePlan& self, int rank) {
            return exchange_group(self.plan, checked_rank(rank, self.plan.ranks()));
          },
          "rank"_a, "The ranks with which `rank` exchanges bytes, itself included.");
}

void define_name_pattern(nb::module_& module) {
  nb::class_<NamePattern>(module, "NamePattern", R"(A regular expression in RE2's syntax.

Args:
    argument: name of the argument in an error.
    expression: without lookaround and back-references, which RE2 lacks.

Raises:
    UsageError: the expression is invalid; the message has RE2's reason.)")
      .def(nb::init<std::string_view, std::string_view>(), "argument"_a, "expression"_a)
      .def("finds", &NamePattern::finds, "name"_a,
           "Whether the expression matches somewhere in `name`.");
}

void define_steps(nb::module_& module) {
  define_name_pattern(module);
  module.def("open_checkpoint", open, "path"_a.none(), nb::kw_only(), "in_save"_a = false,
             R"(Opens a checkpoint: reads and validates headers, index and config.

Args:
    path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache; None: a
        checkpoint without tensors.
    in_save: a save, which may itself be in flight in the directory, opens it.

Raises:
    FormatError: a header or the index is malformed.
    IntegrityError: a file differs from its record (INTEGRITY); a save into the directory is in
        flight or was interrupted (UNCOMMITTED).
    IoError: a file can't be read.)");
  module.def("make_recipe", recipe, "checkpoint"_a, "text"_a = nb::none(), nb::kw_only(),
             "dtype"_a = nb::none(), "keep_fp32"_a = nb::none(), "untie"_a = false,
             R"(Makes the recipe: how each target is made of the checkpoint's tensors.

Args:
    checkpoint: from open_checkpoint.
    text: recipe.json (docs/reference/recipes.md); None: tensors as stored.
    dtype, keep_fp32, untie: as for modicum.plan.

Raises:
    UsageError: the recipe is for another checkpoint.)");
  module.def("make_layout", named_layout, "recipe"_a, "ranks"_a, "layout"_a = "fsdp2",
             nb::kw_only(), "mesh"_a = nb::none(), "shard_dim"_a = 0, "tp_rowwise"_a = nb::none(),
             R"(Shards the targets by a named layout: make_layout(recipe, 8) for FSDP2 on 8 ranks.

Args:
    recipe: from make_recipe.
    ranks: world size.
    layout, mesh, shard_dim, tp_rowwise: as for modicum.plan.)");
  module.def("make_layout", sharded_layout, "recipe"_a, nb::kw_only(), "shardings"_a,
             "sharding_of"_a,
             R"(Shards each target by its own sharding, for programs that read them from a model.

Args:
    recipe: from make_recipe.
    shardings: (mesh, cuts) each. mesh: the sizes of the mesh axes over all ranks, outermost first.
        cuts: (mesh axes, tensor dim, packed parts, pads) each, in order.
    sharding_of: for each target the index of its sharding.)");
}

void define_shard(nb::module_& module) {
  nb::class_<Shard>(module, "Shard", R"(A rank's shard of one tensor.

Args:
    sharding: (mesh, cuts) like those of make_layout.
    shape: shape of the complete tensor.
    rank: global rank.)")
      .def(nb::init<const WrittenSharding&, const std::vector<int64_t>&, int>(), "sharding"_a,
           "shape"_a, "rank"_a)
      .def_prop_ro(
          "shape",
          [](const Shard& self) {
            return tuple_of(local_shape(self.sharding, self.target, self.rank));
          },
          "The shard's shape without padding.")
      .def("runs", &Shard::runs, "order"_a,
           R"(The shard's elements as runs (first, n) of the tensor's elements, in memory order.

Args:
    order: dims from slowest to fastest; [0, 1, ...] is row-major. The shard is contiguous in this
        order, and the tensor's elements are counted in it.)")
      .def_prop_ro(
          "replicas", [](const Shard& self) { return replicas_of(self.sharding, self.rank); },
          "The ranks that hold the same elements, `rank` included; ascending.");
}

void define_make_plan(nb::module_& module) {
  module.def("make_plan", plan, "recipe"_a, "layout"_a, nb::kw_only(), "strategy"_a = "own-shard",
             "ranks_per_node"_a = nb::none(), "destinations"_a = std::vector<std::string>(),
             "staging"_a = nb::none(), "baseline"_a = nb::none(), "init_bytes"_a = 0,
             "caller_sends"_a = false, "budget"_a = nb::none(), "budget_source"_a = "argument",
             "fork"_a = "excluded", "after"_a = std::vector<Purposes>(),
             "save"_a.none() = nb::none(),
             R"(Makes the plan of a load. modicum.make_plan documents the other arguments.

Args:
    destinations: for each target cpu, copy (load calls `copy` with the elements, for example for a
        device) or given (the caller's memory); empty: cpu for all.
    baseline: bytes, or a list of bytes by rank.
    init_bytes: bytes of the largest tensor that load's `caller` makes.
    caller_sends: whether the caller's transport sends bytes between ranks.
    budget_source: name of the budget's source in an error.
    after: by rank, the bytes by purpose that an optimizer takes after the load; empty: nothing.
    save: StateFiles of that optimizer. Then the promise covers a save of model and state, if they
        can be saved.)");
}

}  // namespace

void define_values(nb::module_& module) {
  define_inputs(module);
  define_plan_class(module);
  define_steps(module);
  define_shard(module);
  define_make_plan(module);
}

}  // namespace modicum::python
