// Ledger, Board, load() and its report. The threads of a load are shown in bindings.h.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"
#include "modicum/probe/probe.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"
#include "modicum/python/caller_board.h"
#include "modicum/ranks/ranks.h"
#include "modicum/report/report.h"
#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum::python {
namespace {

// The memory of one load: one buffer, divided into a Part per target.
//
//   Ledger <- Arena ------------------------ buffer ------------------------
//             | Part of target 0 | Part of target 1 | alias: none | ...     |
//
// The Parts share ownership of the Arena. Each Part frees its pages, unless `whole` is set.
struct Arena {
  std::shared_ptr<Ledger> ledger;
  Buffer buffer;
  // Whether all memory is freed at once, with the last owner of the Arena: memory that is pinned
  // for a device or shared with children, and memory of charge_init.
  bool whole = false;
  nb::object kept;  // released before the memory is freed

  Arena(std::shared_ptr<Ledger> owner, Buffer taken, bool as_one = false)
      : ledger(std::move(owner)), buffer(std::move(taken)), whole(as_one) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    if (!kept.is_valid()) return;
    const nb::gil_scoped_acquire acquired;
    kept.reset();
  }
};

// The memory of one target and its charge, unless the Arena is `whole`. The destructor frees the
// pages, then returns the charge.
struct Part {
  std::shared_ptr<Arena> arena;
  std::span<std::byte> bytes;
  Charge charge;

  Part(std::shared_ptr<Arena> owner, std::span<std::byte> part)
      : arena(std::move(owner)), bytes(part) {
    if (!arena->whole) charge = arena->buffer.split(part.size());
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  ~Part() {
    if (!arena->whole) arena->buffer.give_up(bytes);
  }
};

// The result of load().
struct LoadResult {
  std::shared_ptr<MadePlan> plan;
  std::shared_ptr<Arena> arena;
  std::vector<uint64_t> begins;  // offset of each target in the arena, then the end
  RankOutcome outcome;
  std::string compared;  // see text_of_compared
  double elapsed_s = 0;

  // Must be called at most once per target: the Part takes over the charge.
  nb::object storage(uint32_t target) {
    MODICUM_ASSERT(target + 1 < begins.size());
    const uint64_t size = buffer_of(plan->plan, target, outcome.rank).bytes();
    const bool is_ours = destination_of(plan->plan, target) == Destination::cpu;
    const auto part = arena->buffer.bytes().subspan(begins[target], is_ours ? size : 0);
    return array_of(std::make_unique<Part>(arena, part), part);
  }
  // An array that owns nothing, to be pinned and passed to `keep`.
  nb::object whole() {
    arena->whole = true;
    const auto all = arena->buffer.bytes();
    return nb::cast(Bytes(all.data(), {all.size()}, nb::none()));
  }
};

// Sends bytes through the caller's transport, which charges no memory here.
class CallerExchange final : public Exchange {
 public:
  explicit CallerExchange(nb::object broadcast) : broadcast_(std::move(broadcast)) {}
  Charge commit(Ledger&) override { return {}; }
  using Exchange::broadcast;
  void broadcast(int root, std::span<std::byte> bytes, Exchange::Part wanted) override {
    const nb::gil_scoped_acquire acquired;
    broadcast_(root, view_of(bytes), std::min(wanted.begin, bytes.size()),
               std::min(wanted.end, bytes.size()));
  }

 private:
  const nb::object broadcast_;
};

// The arguments of load() that are Python objects, converted while the GIL is held.
struct Functions {
  std::vector<AnyArray> arrays;  // keep the given memory alive
  HostSink::CallerMemory caller_memory;
  HostSink::Copy copy;
  LoadOptions options;
  AnyArray caller_result;  // the last result of `caller`
};

void take_given(const Plan& plan, const nb::dict& arrays, Functions& to) {
  to.caller_memory.resize(plan.recipe->targets.size());
  for (const auto& [target, array] : arrays) {
    const auto index = nb::cast<size_t>(target);
    require_target(index, to.caller_memory.size());
    to.arrays.push_back(writable(array, plan.recipe->targets[index].spec.fqn));
    to.caller_memory[index] = bytes_of_array(to.arrays.back());
  }
}

void take_functions(const nb::object& copy, const nb::object& caller, Functions& to) {
  if (!copy.is_none()) {
    to.copy = [&copy](uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
      const nb::gil_scoped_acquire acquired;
      copy(buffer, at, view_of({const_cast<std::byte*>(elements.data()), elements.size()}));
    };
  }
  if (caller.is_none()) return;
  to.options.caller = [&caller, &to](uint32_t ordinal) -> std::span<const std::byte> {
    const nb::gil_scoped_acquire acquired;
    to.caller_result = AnyArray();
    to.caller_result = nb::cast<AnyArray>(caller(ordinal));
    return bytes_of_array(to.caller_result);
  };
}

// Whether no element goes to a device, where its digest can't be computed.
bool is_on_host(const Plan& plan) {
  for (uint32_t b = 0; b < buffer_count(plan); ++b) {
    if (destination_of(plan, b) == Destination::copy) return false;
  }
  return true;
}

std::unique_ptr<LoadResult> loaded_by(const std::shared_ptr<MadePlan>& python_plan,
                                      const RankLoadTask& task,
                                      const std::shared_ptr<Ledger>& ledger,
                                      const Functions& functions) {
  const int64_t begin = task.clock.now_ns();
  RankLoad load(task, functions.caller_memory, functions.copy);
  load.load();
  if (task.check) {
    load.check_values();
    if (is_on_host(task.plan)) {
      load.outcome().digest =
          digest_of_rank(task.plan, task.at.rank, load.shards(), [&load] { load.beat(); });
    }
  }
  auto loaded = std::make_unique<LoadResult>();
  loaded->plan = python_plan;
  loaded->outcome = load.outcome();
  loaded->compared = text_of_compared(load.compared());
  loaded->elapsed_s = static_cast<double>(loaded->outcome.loaded_ns - begin) / kNsPerSecond;
  loaded->begins = arena_begins(task.plan, task.at.rank);
  // Memory shared with forked children is freed in one piece: children may still read it.
  const bool as_one = task.plan.options.fork == Fork::shared;
  loaded->arena = std::make_shared<Arena>(ledger, load.shards().release(), as_one);
  return loaded;
}

std::unique_ptr<LoadResult> load_into(const std::shared_ptr<MadePlan>& python_plan, int rank,
                                      CallerBoard& board, const std::shared_ptr<Ledger>& ledger,
                                      const nb::dict& arrays, const nb::object& copy,
                                      const nb::object& caller, const nb::object& broadcast,
                                      int threads, bool check, const nb::int_& seed) {
  checked_rank(rank, python_plan->plan.ranks());
  Functions functions;
  take_given(python_plan->plan, arrays, functions);
  take_functions(copy, caller, functions);
  functions.options.threads = threads > 0 ? threads : granted_cpus();
  functions.options.init_seed = seed_of(seed);
  std::optional<CallerExchange> exchange;
  if (!broadcast.is_none()) exchange.emplace(broadcast);
  board.set_thread();
  SteadyClock clock;
  const RankLoadTask task{python_plan->checkpoint(),
                          python_plan->plan,
                          {rank, &board, exchange ? &*exchange : nullptr, ledger.get()},
                          clock,
                          functions.options,
                          check};
  return without_the_lock([&] { return loaded_by(python_plan, task, ledger, functions); });
}

// The comparison of all ranks, from their text_of_compared.
ComparedValues merged(const Manifest& manifest, const std::vector<std::string>& of_ranks,
                      const std::string& folder) {
  ComparedChunks all(manifest, folder);
  for (const std::string& text : of_ranks) merge_compared(text, all);
  return all.finish();
}

// The fields of a rank's outcome and their keys in the dicts that ranks exchange in Python.
struct OutcomeField {
  const char* name;
  uint64_t RankOutcome::*field;
};
constexpr std::array<OutcomeField, 8> kOutcomeFields = {{
    {"ledger_peak_bytes", &RankOutcome::ledger_peak_bytes},
    {"kernel_peak_bytes", &RankOutcome::kernel_peak_bytes},
    {"baseline_bytes", &RankOutcome::baseline_bytes},
    {"page_cache_peak_bytes", &RankOutcome::page_cache_peak_bytes},
    {"storage_read_bytes", &RankOutcome::storage_read_bytes},
    {"exchanged_bytes", &RankOutcome::exchanged_bytes},
    {"bytes_loaded", &RankOutcome::bytes_loaded},
    {"digest", &RankOutcome::digest},
}};

nb::dict outcome_of(const LoadResult& loaded) {
  nb::dict outcome = dict_of("rank"_a = loaded.outcome.rank, "pid"_a = loaded.outcome.pid);
  for (const auto& [name, field] : kOutcomeFields) outcome[name] = loaded.outcome.*field;
  outcome["elapsed_s"] = loaded.elapsed_s;
  outcome["compared"] = loaded.compared;
  outcome["check_s"] = static_cast<double>(loaded.outcome.check_ns) / kNsPerSecond;
  return outcome;
}

nb::dict compared_values(const OpenCheckpoint& source, const std::vector<std::string>& of_ranks,
                         const std::string& folder) {
  const ComparedValues values =
      without_the_lock([&] { return merged(source.checkpoint.manifest, of_ranks, folder); });
  return dict_of("compared_bytes"_a = values.bytes,
                 "not_compared"_a = nb::cast(values.not_compared));
}

// `compared`: the result of compared_values; without it the outcomes must have `compared`.
nb::tuple report_of(const MadePlan& python_plan, const std::vector<nb::dict>& outcomes,
                    bool checked, const std::optional<uint64_t>& budget,
                    const std::string& budget_source, const std::optional<nb::dict>& compared) {
  LoadReport report{.checkpoint = facts_of(python_plan.checkpoint()),
                    .strategy = python_plan.plan.strategy().name,
                    .promise = python_plan.plan.promise,
                    .full_per_rank = full_per_rank_promise(python_plan.plan),
                    .checked = checked};
  if (compared) {
    report.compared = {nb::cast<uint64_t>((*compared)["compared_bytes"]),
                       nb::cast<std::vector<std::string>>((*compared)["not_compared"])};
  } else {
    std::vector<std::string> of_ranks;
    for (const nb::dict& outcome_dict : outcomes)
      of_ranks.push_back(nb::cast<std::string>(outcome_dict["compared"]));
    report.compared = merged(python_plan.checkpoint().manifest, of_ranks, "");
  }
  // The launcher (torchrun, for example) is not counted.
  report.promise.launcher_bytes = report.full_per_rank.launcher_bytes = 0;
  if (checked && is_on_host(python_plan.plan)) report.digest = 0;
  if (budget) report.budget = Budget{*budget, budget_source};
  for (const nb::dict& outcome_dict : outcomes) {
    RankOutcome outcome{.rank = nb::cast<int32_t>(outcome_dict["rank"]),
                        .pid = nb::cast<int32_t>(outcome_dict["pid"])};
    for (const auto& [name, field] : kOutcomeFields) {
      outcome.*field = nb::cast<uint64_t>(outcome_dict[name]);
    }
    report.ranks.push_back(outcome);
    if (report.digest) *report.digest += outcome.digest;
    report.elapsed_s = std::max(report.elapsed_s, nb::cast<double>(outcome_dict["elapsed_s"]));
    report.check_s = std::max(report.check_s, nb::cast<double>(outcome_dict["check_s"]));
  }
  if (report.ranks.size() != static_cast<size_t>(python_plan.plan.ranks())) {
    fail(Category::usage, "a report needs the outcome of every rank",
         {.expected = std::to_string(python_plan.plan.ranks()),
          .got = std::to_string(report.ranks.size())});
  }
  return nb::make_tuple(as_dict(load_json(report)), load_text(report));
}

void define_ledger(nb::module_& module) {
  nb::class_<Ledger>(module, "Ledger",
                     R"(Accounts for model-sized memory, by purpose, within a limit.

Args:
    limit: bytes, or text ("200GiB"); None: no limit.)")
      .def(
          "__init__",
          [](Ledger* ledger, const std::optional<Size>& limit) {
            new (ledger) Ledger(limit ? bytes_of(*limit) : Ledger::kNoLimit, reporter_here());
          },
          "limit"_a = nb::none())
      .def_prop_ro(
          "held_bytes", [](const Ledger& ledger) { return ledger.footprint().total(); },
          "Bytes held now.")
      .def_prop_ro("peak_bytes", &Ledger::peak_bytes, "The highest held_bytes so far.")
      .def_prop_ro(
          "held", [](const Ledger& ledger) { return by_purpose(ledger.footprint()); },
          "Bytes held now, by purpose; largest first.")
      .def_prop_ro(
          "at_peak", [](const Ledger& ledger) { return by_purpose(ledger.at_peak()); },
          "Bytes held at the peak, by purpose; largest first.")
      .def_prop_rw(
          "limit_bytes",
          [](const Ledger& ledger) -> std::optional<uint64_t> {
            const uint64_t limit = ledger.limit_bytes();
            return limit == Ledger::kNoLimit ? std::nullopt : std::optional(limit);
          },
          [](Ledger& ledger, std::optional<uint64_t> bytes) {
            ledger.set_limit(bytes.value_or(Ledger::kNoLimit));
          },
          nb::for_setter("bytes"_a.none()), "The limit in bytes; None: no limit.")
      .def(
          "require_room",
          [](const Ledger& ledger, const std::map<std::string, uint64_t>& needed,
             const std::string& what) { ledger.require_room(from_purposes(needed), what); },
          "needed"_a, "what"_a,
          "Raises BudgetError if the bytes held and `needed`, bytes by purpose, together "
          "exceed the limit. Purposes are those of `held`: process, page_tables, header, plan, "
          "shards, window, master, grad, moments, staging, init, snapshot and fork; another is a "
          "UsageError. What the ledger is not charged with, such as the process itself or copies "
          "of forked workers, is to be added as `process` or `fork`. `what` says in the error what "
          "needs them.");
  module.def(
      "charge_init",
      [](const std::shared_ptr<Ledger>& ledger, uint64_t bytes) {
        auto arena = std::make_unique<Arena>(ledger, ledger->charge(Purpose::init, bytes), true);
        const auto all = arena->buffer.bytes().first(bytes);
        return array_of(std::move(arena), all);
      },
      "ledger"_a, "bytes"_a,
      "An array of zeroed memory for a tensor that the model initialises. The memory is "
      "freed with the array.");
}

void define_forks(nb::module_& module) {
  nb::class_<Exclusion>(module, "Exclusion",
                        R"(Excludes whole pages of the caller's memory from forked children.

Args:
    address, bytes: the pages, which must stay mapped until `undo`.

Raises:
    BudgetError: the kernel refuses, for example for memory of a driver.)")
      .def(
          "__init__",
          [](Exclusion* self, uintptr_t address, size_t bytes) {
            new (self) Exclusion({reinterpret_cast<std::byte*>(address), bytes});
          },
          "address"_a, "bytes"_a)
      .def("undo", &Exclusion::undo,
           "Lets later children inherit the pages again. In a child without them, maps zero pages "
           "there.");
  module.def(
      "is_excluded_here",
      [](uintptr_t address) { return is_excluded_here(reinterpret_cast<const void*>(address)); },
      "address"_a,
      "Whether the memory at this address was excluded from the fork that made this process.");
  module.def("has_exclusions_here", has_exclusions_here,
             "Whether any memory was excluded from the fork that made this process.");
  module.def(
      "require_fork", [](const std::string& fork) { fork_named(fork); }, "fork"_a,
      "Raises UsageError unless `fork` is excluded, shared or inherited.");
}

}  // namespace

void define_load(nb::module_& module) {
  define_ledger(module);
  define_forks(module);
  nb::class_<CallerBoard>(module, "Board",
                          R"(Connects a rank to the other ranks of a load, save or resume.

Args:
    peers: an object with the methods barrier(), agree(digest) and report(document); None: there is
        one rank.)")
      .def(nb::init<nb::object>(), "peers"_a.none() = nb::none())
      .def("fail", &CallerBoard::fail_here, "what"_a, "rank"_a = -1,
           "Cancels the running load or save at its next check. Any thread may call it. "
           "`what`: the reason; `rank`: the rank that has failed, or -1.")
      .def_prop_ro("progress", &CallerBoard::progress, "Bytes read, received or written so far.");
  nb::class_<LoadResult>(module, "Loaded", "The host memory that a load has filled.")
      .def(
          "storage", &LoadResult::storage, "target"_a,
          "The bytes of a target's local buffer, with padding, as an array that owns them. At most "
          "one call per target.")
      .def("whole", &LoadResult::whole,
           "All bytes as one array, for pinning. From now on they are freed together. The "
           "array does not own them; pass it to `keep`.")
      .def(
          "keep",
          [](const LoadResult& loaded, nb::object kept) { loaded.arena->kept = std::move(kept); },
          "kept"_a, "Keeps `kept` alive until just before the memory is freed.")
      .def_prop_ro("outcome", outcome_of, "Rank, pid, bytes and seconds of this load.");
  module.def("load", load_into, "plan"_a, "rank"_a, "board"_a, "ledger"_a, nb::kw_only(),
             "given"_a = nb::dict(), "copy"_a = nb::none(), "caller"_a = nb::none(),
             "broadcast"_a = nb::none(), "threads"_a = 0, "check"_a = false, "seed"_a = 0,
             "Executes one rank's part of a plan. `given`: host memory by target, for "
             "destination `given`. `copy(target, at, view)` receives elements for destination "
             "`copy`, of which the first is element `at`. `caller(ordinal)` returns a tensor "
             "that the model makes. `broadcast(root, view, begin, end)` sends `view` from the "
             "rank number `root` of the exchange group to the others, which need its bytes "
             "[begin, end). modicum.load documents the other arguments.");
  module.def(
      "compared_values", compared_values, "checkpoint"_a, "of_ranks"_a, "folder"_a = "",
      "The values of a checkpoint that all ranks together have compared with its record: a dict "
      "with compared_bytes and not_compared. `of_ranks`: the outcome's `compared` of each "
      "rank. Raises IntegrityError if a value differs. `folder`: for an error, the place of "
      "the files in the saved checkpoint.");
  module.def("load_report", report_of, "plan"_a, "outcomes"_a, "checked"_a, "budget"_a = nb::none(),
             "budget_source"_a = "", "compared"_a = nb::none(),
             "The document of `modicum load --json` and the text of `modicum load`.");
  module.def("parse_size", bytes_of, "size"_a,
             "The bytes of a size: an integer, or text with a unit of 1000 (\"5GB\") or of 1024 "
             "(\"5GiB\", \"5G\").");
}

}  // namespace modicum::python
