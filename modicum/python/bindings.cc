// The Python module `modicum._modicum`: what the command line answers, as Python values.
//
// An answer crosses as its JSON document, which json.loads of the standard library takes apart, so
// that the two fronts can't differ. Whatever may take long runs without the interpreter's lock.
#include "modicum/python/bindings.h"

#include <fmt/format.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>

#include <filesystem>
#include <map>
#include <string>

#include "modicum/report/report.h"
#include "modicum/runs/runs.h"

namespace modicum::python {

uint64_t seed_of(const nb::int_& seed) {
  uint64_t value = 0;
  if (nb::try_cast(seed, value, false)) return value;
  fail(Category::usage, "a seed is a whole number",
       {.expected = "0 to 2^64 - 1", .got = nb::str(seed).c_str()});
}

std::string text_of(const Size& size) {
  if (const auto* bytes = std::get_if<int64_t>(&size)) return std::to_string(*bytes);
  return std::get<std::string>(size);
}

uint64_t bytes_of(const Size& size) { return parse_size(text_of(size)); }

nb::dict as_dict(const std::string& document) {
  return nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(document));
}

TensorSpec spec_of(const std::string& fqn, const std::string& dtype,
                   const std::vector<int64_t>& shape) {
  const auto known = dtype_from_torch_name(dtype);
  if (known) return {.fqn = fqn, .dtype = *known, .shape = shape};
  fail(Category::unsupported, "unknown dtype", {.tensor = fqn, .got = printable(dtype)});
}

int checked_rank(int rank, int ranks) {
  if (rank >= 0 && rank < ranks) return rank;
  fail(Category::usage, "no such rank",
       {.expected = fmt::format("0 to {}", ranks - 1), .got = std::to_string(rank)});
}

namespace {

using Path = std::filesystem::path;

// An empty text where nothing is given; for the same reason a given one must not be empty.
std::string text_of(std::string_view name, const std::optional<std::string>& given) {
  if (given && given->empty()) fail(Category::usage, fmt::format("{}: an empty value", name));
  return given.value_or("");
}
std::string text_of(std::string_view name, const std::optional<Size>& given) {
  return given ? text_of(name, std::optional(python::text_of(*given))) : "";
}

nb::dict inspect(const Path& path) {
  return as_dict(without_the_lock([&] {
    PosixFileSystem files;
    return inspect_json(open_checkpoint(files, path.string()));
  }));
}

constexpr auto kInspectDoc = R"(What is in a checkpoint; reads headers, index and config only.

Args:
    path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.

Returns:
    The document of `modicum inspect --json`: checkpoint, model_type, tie_word_embeddings,
    dtypes, files, tensors, warnings. Bytes are integers.

Raises:
    FormatError: a header or the index is malformed.
    IoError: a file can't be read.)";

// As many parameters as keywords; the defaults are those of the command line.
nb::dict plan(const Path& path, int ranks, std::optional<int> ranks_per_node,
              const std::string& strategy, const std::string& layout,
              const std::optional<std::string>& mesh, int shard_dim,
              const std::optional<std::string>& tp_rowwise,
              const std::optional<std::string>& tp_packed,
              const std::optional<std::string>& tp_replicate,
              const std::optional<std::string>& expert_mesh, const std::string& experts,
              bool round_robin, const std::optional<std::string>& dtype,
              const std::optional<std::string>& keep_fp32, const std::optional<Path>& recipe,
              bool untie, const std::string& destination, const std::optional<Size>& staging,
              const std::optional<Size>& budget, const std::optional<Size>& baseline,
              const std::string& optimizer, const std::optional<Path>& deepspeed, int workers,
              bool persistent_workers) {
  const RunFlags flags{.directory = path.string(),
                       .ranks = ranks,
                       .ranks_per_node = ranks_per_node,
                       .strategy = strategy,
                       .layout = layout,
                       .mesh = text_of("mesh", mesh),
                       .shard_dim = shard_dim,
                       .tp_rowwise = text_of("tp_rowwise", tp_rowwise),
                       .tp_packed = text_of("tp_packed", tp_packed),
                       .tp_replicate = text_of("tp_replicate", tp_replicate),
                       .expert_mesh = text_of("expert_mesh", expert_mesh),
                       .experts = experts,
                       .round_robin = round_robin,
                       .dtype = text_of("dtype", dtype),
                       .keep_fp32 = text_of("keep_fp32", keep_fp32),
                       .recipe = recipe.value_or(Path()).string(),
                       .untie = untie,
                       .optimizer = optimizer,
                       .destination = destination,
                       .staging = text_of("staging", staging),
                       .baseline = text_of("baseline", baseline)};
  const DeepSpeedFlags of_deepspeed{deepspeed.value_or(Path()).string(), workers,
                                    persistent_workers};
  return as_dict(without_the_lock([&, allowed = text_of("budget", budget)] {
    PosixFileSystem files;
    return plan_json(plan_report(files, flags, allowed, of_deepspeed));
  }));
}

constexpr auto kPlanDoc = R"(Who reads what, and what each rank and node will hold, by strategy.

Reads headers, index and config only; no rank is started. Sizes are bytes, or text as on
the command line ("512MB", "1.5GiB").

Args:
    path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.
    ranks: rank processes, 1 to 65536.
    ranks_per_node: None: all on one node.
    strategy: whose verdict `fits` is: own-shard, node-reader, replica-striped,
        rank0-broadcast or full-per-rank.
    layout: fsdp2, hsdp, tp-fsdp, zero1, zero2, zero3, or none (every rank holds everything).
    mesh: "AxB": of hsdp replicas x shards, of tp-fsdp dp x tp; "AxBxC": shards or dp of two axes.
    shard_dim: the tensor dim that is cut.
    tp_rowwise: names (a regular expression) that TP cuts along dim 1; the rest along dim 0.
    tp_packed: names of two packed halves (gate and up), each cut by itself along dim 0.
    tp_replicate: names that TP does not cut.
    expert_mesh: "AxB": experts are dealt to B ranks along dim 0, then FSDP cuts them A times.
    experts: names of the experts, a regular expression.
    round_robin: of zero1 and zero2: as DeepSpeed's round_robin_gradients.
    dtype: float32, bfloat16 or float16; None: as stored.
    keep_fp32: a regular expression; tensors whose names it matches are loaded as float32.
    recipe: a recipe.json; None: every tensor as it is.
    untie: whether what is stored under both names of a tie is loaded as two tensors; else a load
        compares them.
    destination: cpu, or discard (digest and drop).
    staging: per rank, committed whole; None: 8 MiB, less where a budget needs it.
    budget: host memory per node; "auto": what the cgroup and the node leave; None: no verdict.
    baseline: what a rank process holds before Modicum; None: 2 MiB, as the rank processes of
        `modicum load` do. One that has imported torch holds more: "256MiB" is a fair guess.
    optimizer: "none", or "adamw:FORMAT": what is loaded will be trained.
    deepspeed: a ds_config.json; None: no forecast of what DeepSpeed itself would hold.
    workers: of `deepspeed`: forked data-loader workers of a rank, 0 to 1024.
    persistent_workers: of `deepspeed`: whether they live for all epochs.

Returns:
    The document of `modicum plan --json`: checkpoint, ranks, strategies, budget, fits. What
    does not fit is an answer (`fits` is False), not an error.

Raises:
    FormatError: a header or the index is malformed.
    IoError: a file can't be read.
    UsageError: an argument makes no sense, or the recipe is not one for this checkpoint.)";

void define_plan(nb::module_& module) {
  const RunFlags flags;  // for its defaults
  module.def("plan", plan, "path"_a, nb::kw_only(), "ranks"_a = flags.ranks,
             "ranks_per_node"_a = nb::none(), "strategy"_a = flags.strategy,
             "layout"_a = flags.layout, "mesh"_a = nb::none(), "shard_dim"_a = flags.shard_dim,
             "tp_rowwise"_a = nb::none(), "tp_packed"_a = nb::none(), "tp_replicate"_a = nb::none(),
             "expert_mesh"_a = nb::none(), "experts"_a = flags.experts,
             "round_robin"_a = flags.round_robin, "dtype"_a = nb::none(),
             "keep_fp32"_a = nb::none(), "recipe"_a = nb::none(), "untie"_a = flags.untie,
             "destination"_a = flags.destination, "staging"_a = nb::none(), "budget"_a = nb::none(),
             "baseline"_a = nb::none(), "optimizer"_a = flags.optimizer, "deepspeed"_a = nb::none(),
             "workers"_a = 0, "persistent_workers"_a = false, kPlanDoc);
}

// An Error becomes the class of modicum.errors that stands for its category.
void raise(const std::exception_ptr& thrown, void* /*unused*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    try {
      const nb::object raised =
          nb::module_::import_("modicum.errors").attr("from_json")(error_json(error));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    } catch (nb::python_error& other) {
      other.restore();
    }
  }
}

std::map<std::string, int> exit_codes() {
  std::map<std::string, int> codes;
  for (int c = 0; c < static_cast<int>(Category::count); ++c) {
    const auto category = static_cast<Category>(c);
    codes.emplace(category_name(category), exit_code(category));
  }
  return codes;
}

}  // namespace
}  // namespace modicum::python

NB_MODULE(_modicum, module) {
  namespace front = modicum::python;
  using namespace nanobind::literals;
  nanobind::set_leak_warnings(false);  // parameters may live as long as the process
  nanobind::register_exception_translator(front::raise);
  module.def(
      "version", [] { return MODICUM_VERSION; }, "The version of the library, as in the wheel.");
  module.def("exit_codes", front::exit_codes, "The exit code of each category of errors.");
  module.def("inspect", front::inspect, "path"_a, front::kInspectDoc);
  front::define_plan(module);
  front::define_source(module);
  front::define_values(module);
  front::define_recipe_builder(module);
  front::define_load(module);
  front::define_optim(module);
  front::define_probe(module);
}
