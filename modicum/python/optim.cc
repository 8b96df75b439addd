// AdamW over shards, its options and state formats.
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/probe/probe.h"
#include "modicum/python/adamw_state.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"
#include "modicum/stream/stream.h"

namespace modicum::python {
namespace {

using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kPieceElements = kBucketElements * 16;  // a thread processes one piece at a time

using Names = std::span<const std::string_view>;

// The names of Plane, StatePlane and AdamSemantics, in the order of these enumerations.
constexpr std::array<std::string_view, kPlanes> kPlaneNames = {
    "master", "master_low", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
constexpr std::array<std::string_view, 4> kStatePlaneNames = {"master", "exp_avg", "exp_avg_sq",
                                                              "max_exp_avg_sq"};
constexpr std::array<std::string_view, 2> kSemanticsNames = {"torch", "deepspeed"};

template <typename Value>
Value named(Names names, const char* what, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<Value>(found - names.begin());
  fail(Category::usage, fmt::format("unknown {} '{}'", what, printable(name)));
}

// An array that shares the memory of `object`. Bound functions take nb::handle and call this,
// because with an ndarray parameter the type stub would need numpy.
template <typename Array>
Array taken(nb::handle object, const std::string& fqn, const char* kind) {
  Array array;
  if (nb::try_cast(object, array, false)) return array;
  fail(Category::usage, fmt::format("expected {}", kind), {.tensor = fqn});
}
constexpr auto kFloatsKind = "a contiguous one-dimensional float32 array on the host";

std::shared_ptr<State> state(const std::vector<PythonShard>& shards,
                             const std::vector<AdamOptions>& groups, const std::string& format,
                             const std::shared_ptr<Ledger>& ledger, const nb::int_& seed,
                             int threads, int slots, const nb::object& pin, const nb::object& unpin,
                             const std::optional<uint64_t>& pin_limit, const std::string& fork) {
  if (pin.is_none() != unpin.is_none()) {
    fail(Category::usage, "pin and unpin must be given together");
  }
  if (slots < 0) {
    fail(Category::usage, "the number of slots must not be negative",
         {.got = std::to_string(slots)});
  }
  ShardsFromPython converted = written(shards, groups, format, seed_of(seed));
  converted.spec.fork = fork_named(fork);
  const Pinner pinner = pinner_of(pin, unpin, pin_limit);
  return without_the_lock([&] {
    return std::make_shared<State>(std::move(converted), ledger, slots,
                                   threads > 0 ? threads : granted_cpus(), pinner);
  });
}

// Takes the gradients of complete shards from the plane `grad`, and sums their squares, on all
// threads.
void arrived_in_place(State& state, const std::vector<size_t>& shards) {
  AdamW& adamw = state.here();
  std::vector<Piece> pieces;
  for (const size_t shard : shards) {
    const int64_t numel = state.shard(shard).numel();
    for (int64_t at = 0; at < numel; at += kPieceElements) {
      pieces.push_back({.shard = shard, .at = at, .n = std::min(kPieceElements, numel - at)});
    }
  }
  without_the_lock([&] {
    std::atomic<size_t> next = 0;
    run_workers(state.threads, [&](int) {
      for (size_t i = next++; i < pieces.size(); i = next++) {
        adamw.arrived_in_place(pieces[i].shard, pieces[i].at, pieces[i].n);
      }
    });
  });
}

void arrive(State& state, size_t shard, nb::handle array, int64_t at) {
  AdamW& adamw = state.here();
  const std::string& fqn = state.shard(shard).fqn;
  const auto elements = taken<AnyArray>(array, fqn, "a contiguous array on the host");
  const Piece piece{.shard = shard,
                    .at = at,
                    .n = static_cast<int64_t>(elements.size()),
                    .elements = bytes_of_array(elements).data(),
                    .dtype = dtype_of(elements, fqn)};
  without_the_lock([&] { adamw.arrive(piece); });
}

nb::tuple norms(State& state) {
  nb::list sums;
  bool finite = true;
  for (const GradNorm& norm : state.here().norms()) {
    sums.append(norm.sum_of_squares);
    finite = finite && norm.finite;
  }
  return nb::make_tuple(sums, finite);
}

std::vector<int64_t> steps(const State& state) {
  std::vector<int64_t> counts;
  for (size_t shard = 0; shard < state.adamw.shards(); ++shard) {
    counts.push_back(state.adamw.steps(shard));
  }
  return counts;
}

void step(State& state, float unscale, float clip, const nb::object& send, const nb::object& wait,
          const std::string& dtype, bool refresh_masters) {
  AdamW& adamw = state.here();
  std::optional<PythonOutlet> sending;
  if (!send.is_none()) sending.emplace(state, send, wait, dtype);
  const ReportedPhase phase(state.ledger->reporter(), "step");
  without_the_lock([&] {
    adamw.step({.unscale = unscale,
                .clip = clip,
                .outlet = sending ? &sending->outlet() : nullptr,
                .refresh_masters = refresh_masters});
  });
  if (sending) sending->require_sent();
}

// The arguments of `step` for one state.
struct PythonStateStep {
  std::shared_ptr<State> state;
  nb::object send;
  nb::object wait;
  std::string dtype;
  bool refresh_masters = false;
};

void step_all(const std::vector<PythonStateStep>& wanted, float unscale, float clip,
              const std::shared_ptr<Snapshot>& snapshot) {
  const ReportedPhase phase(reporter_here(), "step");
  BeforeOverwrite before;
  if (snapshot) {
    before = [&](std::span<const std::byte> memory) { snapshot->before_overwrite(memory); };
  }
  std::deque<PythonOutlet> sendings;  // a deque: elements must not move
  std::vector<StateStep> steps;
  for (const auto& [state, send, wait, dtype, refresh_masters] : wanted) {
    StepOptions options{.unscale = unscale,
                        .clip = clip,
                        .refresh_masters = refresh_masters,
                        .before_overwrite = before ? &before : nullptr};
    if (!send.is_none()) {
      options.outlet = &sendings.emplace_back(*state, send, wait, dtype).outlet();
    }
    steps.push_back({&state->here(), options});
  }
  without_the_lock([&] { AdamW::step_all(steps); });
  for (const PythonOutlet& sending : sendings) sending.require_sent();
}

// Bytes of the state as an array that shares ownership of the state.
nb::object shown(const std::shared_ptr<State>& state, std::span<std::byte> bytes) {
  return array_of(std::make_unique<std::shared_ptr<State>>(state), bytes);
}

nb::object plane(const std::shared_ptr<State>& state, size_t shard, const std::string& name) {
  state->shard(shard);
  return shown(state, state->adamw.plane(shard, named<Plane>(kPlaneNames, "plane", name)));
}

nb::object scales(const std::shared_ptr<State>& state, size_t shard, const std::string& name) {
  state->shard(shard);
  const std::span<float> scales =
      state->adamw.scales(shard, named<Plane>(kPlaneNames, "plane", name));
  return shown(state, std::as_writable_bytes(scales));
}

void export_to(State& state, size_t shard, const std::string& name, nb::handle array, int64_t at) {
  const AdamW& adamw = state.here();
  const auto to = taken<Floats>(array, state.shard(shard).fqn, kFloatsKind);
  const StatePlane plane = named<StatePlane>(kStatePlaneNames, "plane", name);
  without_the_lock([&] { adamw.export_to(shard, plane, at, {to.data(), to.size()}); });
}

void import_from(State& state, size_t shard, const std::string& name, nb::handle array,
                 int64_t at) {
  AdamW& adamw = state.here();
  const auto from = taken<ReadFloats>(array, state.shard(shard).fqn, kFloatsKind);
  const StatePlane plane = named<StatePlane>(kStatePlaneNames, "plane", name);
  without_the_lock([&] { adamw.import_from(shard, plane, at, {from.data(), from.size()}); });
}

nb::dict digest(State& state) {
  const AdamW& adamw = state.here();
  const StateDigest result = without_the_lock([&] { return adamw.digest(); });
  return dict_of("state"_a = result.state, "master"_a = result.master);
}

std::string format_of(const std::string& dtype, const std::vector<int64_t>& shape,
                      const std::string& asked) {
  const std::optional<DType> known = dtype_from_torch_name(dtype);
  if (!known) fail(Category::usage, fmt::format("unknown dtype '{}'", printable(dtype)));
  const StateFormat format = state_format_of(*known, shape, state_format_named(asked).format);
  return std::string(row_of(format).name);
}

nb::list formats() {
  nb::list rows;
  for (const StateFormatRow& row : all_state_formats()) {
    nb::object low = nb::none();
    if (row.master_low != DType::boolean) low = nb::cast(torch_name(row.master_low));
    rows.append(dict_of("name"_a = row.name, "master"_a = torch_name(row.master),
                        "master_low"_a = low, "grad"_a = torch_name(row.grad),
                        "moment"_a = torch_name(row.moment)));
  }
  return rows;
}

void define_options(nb::module_& module) {
  const AdamOptions defaults;
  nb::class_<AdamOptions>(module, "AdamOptions", "The options of one parameter group.")
      .def(
          "__init__",
          [](AdamOptions* self, const std::string& semantics, double lr,
             std::pair<double, double> betas, double eps, double weight_decay, bool decoupled,
             bool amsgrad, bool maximize, bool bias_correction) {
            new (self) AdamOptions{named<AdamSemantics>(kSemanticsNames, "semantics", semantics),
                                   lr,
                                   betas.first,
                                   betas.second,
                                   eps,
                                   weight_decay,
                                   decoupled,
                                   amsgrad,
                                   maximize,
                                   bias_correction};
          },
          nb::kw_only(), "semantics"_a = "torch", "lr"_a = defaults.lr,
          "betas"_a = std::pair(defaults.beta1, defaults.beta2), "eps"_a = defaults.eps,
          "weight_decay"_a = defaults.weight_decay, "decoupled"_a = defaults.decoupled,
          "amsgrad"_a = defaults.amsgrad, "maximize"_a = defaults.maximize,
          "bias_correction"_a = defaults.bias_correction);
}

constexpr auto kShardDoc = R"(A rank's elements of a parameter, to make an AdamW.

Args:
    fqn: the parameter's name.
    shape: of the complete parameter.
    runs: (first, number) of the elements, ascending.
    group: an index into the groups of the AdamW.
    master: an array to use as the master (float32, or the bfloat16 half of a split master); None:
        the AdamW has memory for it.
    out: a bfloat16 or float16 array that receives new parameters, or None.)";

constexpr auto kStateDoc = R"(AdamW's state over the shards of a rank. All memory is allocated here.

Args:
    shards: the shards; the state keeps their arrays alive.
    groups: options by group.
    format: the name of a state format, see state_formats.
    ledger: is charged for all memory.
    seed: for stochastic rounding; equal on every rank.
    threads: for construction and steps; 0: one per usable CPU.
    slots: number of slots of SLOT_BYTES per thread, for `send` of a step; see `staging`.
    pin, unpin: called with address and bytes of each block of memory that a device accesses; None:
        not pinned.
    pin_limit: bytes that the process may still lock; None: no limit.
    fork: how forked children see the state: excluded, shared or inherited.

Raises:
    BudgetError: BUDGET if the state needs more than the ledger's limit or pin_limit, before a page
        is touched; NOMEM if the kernel refuses memory.
    UsageError: shards, options and format do not match.)";

// The members that show or set the values of the state.
void define_contents(nb::class_<State>& bound) {
  bound
      .def(
          "plane", plane, "shard"_a, "plane"_a,
          "The bytes of master, master_low, grad, exp_avg, exp_avg_sq or max_exp_avg_sq; the array "
          "keeps the state alive.")
      .def_prop_ro(
          "staging",
          [](const std::shared_ptr<State>& self) { return shown(self, self->staging.bytes()); },
          "The bytes of the slots; the array keeps the state alive.")
      .def("scales", scales, "shard"_a, "plane"_a, "The float32 scales of 8-bit moments, as bytes.")
      .def("export_to", export_to, "shard"_a, "plane"_a, "to"_a, "at"_a = 0,
           "Fills `to`, a float32 array, with the values of a plane from element `at` on.")
      .def("import_from", import_from, "shard"_a, "plane"_a, "values"_a, "at"_a = 0,
           "Stores float32 values in a plane, from element `at` on. They are exact in float32 "
           "planes and in split masters of 32 bits, the nearest codes in 8-bit moments, and "
           "rounded as in a step otherwise.")
      .def_prop_ro(
          "footprint", [](const State& self) { return by_purpose(self.footprint); },
          "The bytes charged to the ledger, by purpose.")
      .def("digest", digest,
           "A dict of `state` and `master`, digests of this rank's values. Their sums over "
           "all ranks, modulo 2^64, are the digests of all values.");
}

void define_state(nb::module_& module) {
  nb::class_<PythonShard>(module, "AdamWShard", kShardDoc)
      .def(nb::init<std::string, std::vector<int64_t>, std::vector<std::pair<int64_t, int64_t>>,
                    int, nb::object, nb::object>(),
           "fqn"_a, "shape"_a, "runs"_a, "group"_a = 0, "master"_a.none() = nb::none(),
           "out"_a.none() = nb::none());
  nb::class_<State> bound(module, "AdamW", kStateDoc);
  bound
      .def(nb::new_(&state), "shards"_a, "groups"_a, nb::kw_only(), "format"_a, "ledger"_a,
           "seed"_a = 0, "threads"_a = 0, "slots"_a = 0, "pin"_a.none() = nb::none(),
           "unpin"_a.none() = nb::none(), "pin_limit"_a = nb::none(), "fork"_a = "excluded")
      .def(
          "set_options",
          [](State& self, int group, const AdamOptions& options) {
            self.adamw.set_options(group, options);
          },
          "group"_a, "options"_a, "Sets the options of a group, from the next step on.")
      .def("arrive", arrive, "shard"_a, "elements"_a, "at"_a = 0,
           "Stores part of a shard's gradient, from local element `at` on. In each step every "
           "element must arrive once.")
      .def("arrived_in_place", arrived_in_place, "shards"_a,
           "Like arrive, for complete shards whose gradients are in the plane `grad`. Uses all "
           "threads.")
      .def(
          "leave_out",
          [](State& self, size_t shard) {
            self.shard(shard);
            self.here().leave_out(shard);
          },
          "shard"_a, "Declares that a shard has no gradient in this step.")
      .def("norms", norms,
           "(sums, finite): the sum of squares of the gradients of each shard that have "
           "arrived, and whether all gradients are finite.")
      .def("step", step, "unscale"_a = 1.0F, "clip"_a = 1.0F, nb::kw_only(),
           "send"_a.none() = nb::none(), "wait"_a.none() = nb::none(), "dtype"_a = "bfloat16",
           "refresh_masters"_a = false,
           "Makes one step with the gradients that have arrived. Calls `send(shard, at, n, slot)` "
           "when `n` new values in `dtype`, of a shard from local element `at` on, are at the "
           "beginning of a slot of `staging`. They stay there until `wait(slot)` has returned. For "
           "a split master, `slot` is -1: the values are in the plane `master`, and `wait` is not "
           "called. Both are called on several threads. Their first error is raised after the "
           "step, which is complete nevertheless. `refresh_masters`: whether to call "
           "refresh_masters first.")
      .def(
          "refresh_masters",
          [](State& self) {
            AdamW& adamw = self.here();
            without_the_lock([&] { adamw.refresh_masters(); });
          },
          "Copies the values that the caller has written to the arrays `out` into the "
          "masters. A value that equals the rounded master is not copied.")
      .def(
          "skip", [](State& self) { self.here().skip(); },
          "Discards the gradients; changes nothing else.")
      .def_prop_ro("steps", steps, "The step count of each shard's parameter.")
      .def(
          "set_steps",
          [](State& self, size_t shard, int64_t steps) {
            self.shard(shard);
            self.adamw.set_steps(shard, steps);
          },
          "shard"_a, "steps"_a, "Sets the step count of a shard's parameter.");
  define_contents(bound);
}

}  // namespace

void define_optim(nb::module_& module) {
  define_options(module);
  define_state(module);
  module.def(
      "adamw_footprint",
      [](const std::vector<PythonShard>& shards, const std::vector<AdamOptions>& groups,
         const std::string& format, int slots, int threads, const std::string& fork) {
        AdamWSpec spec = written(shards, groups, format, 0).spec;
        spec.fork = fork_named(fork);
        return by_purpose(footprint_of(spec, slots, threads));
      },
      "shards"_a, "groups"_a, nb::kw_only(), "format"_a, "slots"_a = 0, "threads"_a = 1,
      "fork"_a = "excluded", "The memory of an AdamW with these arguments, in bytes by purpose.");
  nb::class_<PythonStateStep>(module, "StateStep",
                              "The step of one state, with arguments as for AdamW.step.")
      .def(nb::init<std::shared_ptr<State>, nb::object, nb::object, std::string, bool>(), "state"_a,
           "send"_a.none() = nb::none(), "wait"_a.none() = nb::none(), "dtype"_a = "bfloat16",
           "refresh_masters"_a = false);
  module.def(
      "step_all", step_all, "steps"_a, "unscale"_a = 1.0F, "clip"_a = 1.0F,
      "snapshot"_a.none() = nb::none(),
      "AdamW.step for several states together: if it raises before anything is sent, none has "
      "been stepped. `snapshot`: the snapshot of a save that reads their memory meanwhile.");
  module.def("clip_factor", clip_factor, "norm"_a, "max_norm"_a,
             "min(1, max_norm / (norm + 1e-6)), rounded once to float32.");
  module.def("state_formats", formats,
             "A dict for each format: name, and the dtypes of its planes.");
  module.def("state_format_of", format_of, "dtype"_a, "shape"_a, "asked"_a,
             "The format of a parameter of `dtype` and `shape` when the user asks for `asked`.");
  module.attr("SLOT_BYTES") = kRingSlotBytes;
}

}  // namespace modicum::python
