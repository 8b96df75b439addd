// The Python module `modicum._modicum`, with its functions `inspect` and `plan`.
//
// Their results are the JSON documents that the command line prints, parsed by json.loads. So the
// two can't differ.
#include "modicum/python/bindings.h"

#include <fmt/format.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>

#include <charconv>
#include <filesystem>
#include <map>
#include <string>

#include "modicum/report/report.h"
#include "modicum/training/training.h"

namespace modicum::python {

uint64_t seed_of(const nb::int_& seed) {
  uint64_t value = 0;
  if (nb::try_cast(seed, value, false)) return value;
  fail(Category::usage, "a seed is out of range",
       {.expected = "0 to 2^64 - 1", .got = nb::str(seed).c_str()});
}

std::string text_of(const Size& size) {
  if (const auto* bytes = std::get_if<int64_t>(&size)) return std::to_string(*bytes);
  return std::get<std::string>(size);
}

uint64_t bytes_of(const Size& size) { return parse_size(text_of(size)); }

std::string text_of_compared(const ComparedChunks& compared) {
  if (!compared.has_record()) return "";
  std::string text;
  for (const std::byte byte : compared.bytes()) text += fmt::format("{:02x}", byte);
  return text;
}

void merge_compared(const std::string& text, ComparedChunks& all) {
  if (text.empty()) return;
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    uint8_t byte = 0;
    std::from_chars(&text[i], &text[i] + 2, byte, 16);
    bytes.push_back(std::byte{byte});
  }
  all.merge(bytes);
}

nb::dict as_dict(const std::string& document) {
  return nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(document));
}

TensorSpec spec_of(const std::string& fqn, const std::string& dtype,
                   const std::vector<int64_t>& shape) {
  const auto known = dtype_from_torch_name(dtype);
  if (known) return {.fqn = fqn, .dtype = *known, .shape = shape};
  fail(Category::unsupported, "unknown dtype", {.tensor = fqn, .got = printable(dtype)});
}

namespace {

using Path = std::filesystem::path;

// The text of a flag; "" for None. Throws USAGE for an empty text, which would count as None.
std::string text_of(std::string_view name, const OptionalText& value) {
  if (value && value->empty()) fail(Category::usage, fmt::format("{}: an empty value", name));
  return value.value_or("");
}
std::string text_of(std::string_view name, const std::optional<Size>& value) {
  return value ? text_of(name, std::optional(python::text_of(*value))) : "";
}

// The name of an argument `dtype`: a torch.dtype or text.
std::string dtype_name_of(const std::optional<nb::object>& dtype) {
  if (!dtype) return "";
  const std::string text = nb::str(*dtype).c_str();
  constexpr std::string_view kPrefix = "torch.";
  return text_of("dtype",
                 std::optional(text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : text));
}

nb::dict inspect(const Path& path) {
  return as_dict(without_the_lock([&] {
    PosixFileSystem files;
    return inspect_json(open_checkpoint(files, path.string(), Record::ignored, Content::headers));
  }));
}

constexpr auto kInspectDoc = R"(The contents of a checkpoint. Reads headers, index and config only.

Args:
    path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.

Returns:
    The document of `modicum inspect --json`: checkpoint, model_type, tie_word_embeddings,
    dtypes, files, tensors, warnings. Numbers of bytes are integers.

Raises:
    FormatError: a header or the index is malformed.
    IoError: a file can't be read.)";

// A parameter for each keyword of Python; the defaults are those of the command line.
nb::dict plan(const Path& path, int ranks, std::optional<int> ranks_per_node,
              const std::string& strategy, const std::string& layout, const OptionalText& mesh,
              int shard_dim, const OptionalText& tp_rowwise, const OptionalText& tp_packed,
              const OptionalText& tp_replicate, const OptionalText& expert_mesh,
              const std::string& experts, bool round_robin, const std::optional<nb::object>& dtype,
              const OptionalText& keep_fp32, const std::optional<Path>& recipe, bool untie,
              const std::string& destination, bool device, const std::optional<Size>& staging,
              const std::optional<Size>& budget, const std::optional<Size>& baseline,
              const std::string& optimizer, const OptionalText& frozen,
              const std::optional<Path>& deepspeed, int workers, bool persistent_workers,
              bool protect) {
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
                       .dtype = dtype_name_of(dtype),
                       .keep_fp32 = text_of("keep_fp32", keep_fp32),
                       .recipe = recipe.value_or(Path()).string(),
                       .untie = untie,
                       .optimizer = optimizer,
                       .frozen = text_of("frozen", frozen),
                       .destination = destination,
                       .on_device = device,
                       .staging = text_of("staging", staging),
                       .baseline = text_of("baseline", baseline)};
  const PlanFlags of_plan{
      .budget = text_of("budget", budget),
      .deepspeed = {deepspeed.value_or(Path()).string(), workers, persistent_workers, protect}};
  return as_dict(without_the_lock([&] {
    PosixFileSystem files;
    return plan_json(job_report(files, flags, of_plan));
  }));
}

constexpr auto kPlanDoc =
    R"(Which rank reads which bytes, and what each rank and node holds, by strategy.

Reads headers, index and config only; starts no rank. Sizes are bytes, or text as on the command
line ("512MB", "1.5GiB").

Args:
    path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache; of known
        models config.json is enough.
    ranks: number of rank processes, 1 to 65536.
    ranks_per_node: number of ranks on a node; None: all ranks are on one node.
    strategy: the strategy to which the result's `fits` refers: own-shard, node-reader,
        replica-striped, rank0-broadcast or full-per-rank.
    layout: fsdp2, hsdp, tp-fsdp, zero1, zero2, zero3, or none (every rank holds all tensors).
    mesh: "AxB": for hsdp A replicas of B shards, for tp-fsdp dp A and tp B. "AxBxC" has one mesh
        axis more: for hsdp it shards over B x C, for tp-fsdp dp is A x B.
    shard_dim: the tensor dim to shard.
    tp_rowwise: a regular expression; TP shards tensors with matching names on dim 1 instead of 0.
    tp_packed: a regular expression; tensors with matching names have two packed halves (gate and
        up), each of which TP shards on dim 0.
    tp_replicate: a regular expression; TP replicates tensors with matching names.
    expert_mesh: "AxB": EP shards experts on dim 0 over B ranks, then FSDP shards them over A.
    experts: a regular expression that matches the names of experts.
    round_robin: for zero1 and zero2: DeepSpeed's round_robin_gradients.
    dtype: float32, bfloat16 or float16, a torch.dtype or its name; None: as stored.
    keep_fp32: a regular expression; tensors with matching names are loaded as float32.
    recipe: a recipe.json; None: tensors as stored.
    untie: if both names of a tie are stored, load both tensors. By default a load compares them.
    destination: cpu, or discard: the elements are digested and dropped.
    device: whether parameters are on devices, and gradients and optimizer state on the host.
    staging: bytes per rank, committed before the load; None: 8 MiB, less if the budget requires it.
    budget: host memory per node; "auto": what the cgroup and the node have left; None: not checked.
    baseline: bytes that a rank process holds before the load; None: 2 MiB, as in `modicum load`. A
        process that has imported torch holds 0.3 to 1.5 GiB: `modicum.memory.held()` in a rank,
        after the model was built.
    optimizer: "none", or "adamw:FORMAT" to include the state of `AdamW(state_format=FORMAT)`. Never
        included: activations, and where parameters are on the CPU torch's own `grad` of bfloat16
        ones with fp32 (2 bytes per parameter).
    frozen: a regular expression; no state is included for parameters with matching names.
    deepspeed: a ds_config.json, to forecast DeepSpeed's own memory; None: no forecast.
    workers: for the forecast: forked data-loader workers per rank, 0 to 1024.
    persistent_workers: for the forecast: whether the workers live for all epochs.
    protect: for the forecast: whether the program calls `modicum.torch.protect`.

Returns:
    The document of `modicum plan --json` (docs/reference/plan.md): checkpoint, ranks, strategies,
    budget, fits. A plan that exceeds the budget is no error: `fits` is False then, and there is
    `shortfall_bytes`. Without a budget `fits` is None. Nodes are in `strategies[i]["nodes"]`, a
    strategy for each `name`: `peak_bytes`, and `phases` of open, load, hold and step, each with
    `phase` and `bytes`. With `optimizer`, and without `device`, each node also has `job` of the
    whole job, a save and a resume on the same number of ranks included: `peak_bytes` and `phases`
    of load, step, save, resume and step_resumed. `job_fits` is about that save and resume, `fits`
    about load and steps; it is there with a budget, and `job_shortfall_bytes` if it is False. If
    either is False, `would_fit` has changes with which all fit, those on as many nodes first: dicts
    of `flags` (one text), all values with the changes (strategy, staging_bytes, state_format,
    dtype, ranks_per_node), `peak_bytes` of load and steps, and `lossless` or `lossy`, a text that
    says which values stay or get lost. A node's sum includes 8 MiB of the process that starts its
    ranks; torchrun holds about 150 MiB. `strategies[i]["ranks"]` has each rank's `peak_bytes` of
    load and steps.

    Not included: what torch allocates for activations, for units that FSDP2 has gathered and for
    communication. A process keeps much of it after its first steps (160 MiB and more), and a later
    `save(budget=)` counts it.

Raises:
    FormatError: a header or the index is malformed.
    IoError: a file can't be read.
    UsageError: an argument is invalid, or the recipe is for another checkpoint.)";

// The label and the document of a run.
using LabelledRun = std::pair<std::string, std::string>;

std::string page_of(const std::string& title, const std::vector<LabelledRun>& runs,
                    const std::string& sentence) {
  std::vector<PageRun> borrowed;
  for (const auto& [label, document] : runs) borrowed.push_back({label, document});
  return report_page(title, borrowed, {.sentence = sentence});
}

void define_plan(nb::module_& module) {
  const RunFlags flags;  // for its defaults
  module.def("plan", plan, "path"_a, nb::kw_only(), "ranks"_a = flags.ranks,
             "ranks_per_node"_a = nb::none(), "strategy"_a = flags.strategy,
             "layout"_a = flags.layout, "mesh"_a = nb::none(), "shard_dim"_a = flags.shard_dim,
             "tp_rowwise"_a = nb::none(), "tp_packed"_a = nb::none(), "tp_replicate"_a = nb::none(),
             "expert_mesh"_a = nb::none(), "experts"_a = flags.experts,
             "round_robin"_a = flags.round_robin, "dtype"_a = nb::none(),
             "keep_fp32"_a = nb::none(), "recipe"_a = nb::none(), "untie"_a = flags.untie,
             "destination"_a = flags.destination, "device"_a = flags.on_device,
             "staging"_a = nb::none(), "budget"_a = nb::none(), "baseline"_a = nb::none(),
             "optimizer"_a = flags.optimizer, "frozen"_a = nb::none(), "deepspeed"_a = nb::none(),
             "workers"_a = 0, "persistent_workers"_a = false, "protect"_a = false, kPlanDoc);
}

// Raises an Error as the class of modicum.errors for its category.
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
      "version", [] { return MODICUM_VERSION; }, "The version of the library and the wheel.");
  module.def("exit_codes", front::exit_codes, "The exit code of each category of errors.");
  module.def("inspect", front::inspect, "path"_a, front::kInspectDoc);
  front::define_plan(module);
  module.def("report_page", front::page_of, "title"_a, "runs"_a, "sentence"_a = "",
             "The text of an HTML page about runs. `runs`: (label, text of a JSON document with "
             "`timeline` and `peak`) each. `sentence` is shown above the charts.");
  front::define_files(module);
  front::define_source(module);
  front::define_values(module);
  front::define_recipe_builder(module);
  front::define_load(module);
  front::define_masters(module);
  front::define_optim(module);
  front::define_save(module);
  front::define_probe(module);
  front::define_main_thread(module);
  front::define_worker_signals(module);
  front::define_reporting(module);
}
