#include "modicum/runs/would_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "modicum/runs/cheapest.h"
#include "modicum/runs/runs.h"
#include "modicum/runs/state_change.h"

namespace modicum {
namespace {

// A set of changes to the requested run.
struct Change {
  bool staging = false;  // less, down to kMinStagingBytes
  const Strategy* strategy = nullptr;
  bool dtype = false;  // the run of kNarrowDType
  std::optional<StateFormat> format;
  bool nodes = false;  // fewer ranks per node
  StateChange state;   // by `dtype` and `format`

  int count() const noexcept {
    return int{staging} + int{strategy != nullptr} + int{dtype} + int{format.has_value()} +
           int{nodes};
  }
  // Changes of a lower rank are preferred.
  auto rank() const noexcept { return std::tuple(nodes, state.loss, count()); }
  // Whether it need not be tried, since `found` fits. With more nodes another format of equal loss
  // may need fewer of them.
  bool is_dearer_than(const Change& found) const noexcept {
    if (nodes != found.nodes || rank() <= found.rank()) return false;
    return !nodes || state.loss > found.state.loss || staging || strategy != nullptr;
  }
};

constexpr DType kNarrowDType = DType::bf16;

// `run` with --dtype bfloat16; nullopt if no target would be narrower.
std::optional<Run> narrower_run(const RunFlags& flags, const Run& run) {
  const auto narrows = [&run](const Target& target) {
    const DType dtype = target.spec.dtype;
    return dtype == DType::f32 || (run.optimizer && dtype == DType::f16);
  };
  const std::vector<Target>& targets = run.recipe.targets;
  if (std::none_of(targets.begin(), targets.end(), narrows)) return std::nullopt;
  RunFlags narrow = flags;
  narrow.dtype = torch_name(kNarrowDType);
  return open_run(*run.files, narrow, Content::headers);
}

// All sets of changes, the preferred ones first. `narrow`: may be nullptr.
std::vector<Change> changes_of(const Run& run, const Run* narrow, const Budget& budget) {
  std::vector<const Strategy*> others = {nullptr};
  for (const Strategy& strategy : strategies()) {
    if (&strategy != run.options.strategy) others.push_back(&strategy);
  }
  std::vector<std::optional<StateFormat>> formats = {std::nullopt};
  for (const StateFormatRow& row : state_formats()) {
    if (run.optimizer && row.format != *run.optimizer) formats.emplace_back(row.format);
  }
  std::vector<Change> changes;
  for (const bool is_cast : {false, true}) {
    if (is_cast && narrow == nullptr) continue;
    for (const auto& format : formats) {
      const auto state = state_change(run, is_cast ? *narrow : run, format);
      if (!state) continue;
      for (const Strategy* strategy : others) {
        for (const bool staging : {false, true}) {
          changes.push_back({staging, strategy, is_cast, format, false, *state});
        }
      }
    }
  }
  add_nodes_and_sort(changes, !budget.is_shared);  // if shared, all nodes are this machine
  return changes;
}

class Search {
 public:
  // `narrow`: the run of kNarrowDType; nullptr if no change has it.
  Search(const RunFlags& flags, const Run& run, const Run* narrow, const Budget& budget,
         FitsJob fits_job)
      : flags_(flags), run_(run), narrow_(narrow), budget_(budget), fits_job_(fits_job) {}

  std::optional<Alternative> try_change(const Change& change) {
    const int asked = ranks_per_node_of(run_);
    const std::optional<Plan> plan =
        change.nodes ? most_per_node(run_.layout.world_size(), asked,
                                     [&](int count) { return plan_of(change, count); })
                     : plan_of(change, asked);
    if (!plan || (change.staging && plan->options.staging_bytes >= run_.options.staging_bytes)) {
      return std::nullopt;
    }
    Alternative found{.strategy = plan->strategy().name,
                      .staging_bytes = plan->options.staging_bytes,
                      .state_format = change.format ? change.format : run_.optimizer,
                      .ranks_per_node = plan->options.ranks_per_node,
                      .peak_bytes = plan->promise.node_peak_bytes(worst_node(plan->promise)),
                      .is_lossless = change.state.loss == 0,
                      .note = change.state.note};
    if (change.dtype) found.dtype = kNarrowDType;
    found.flags = flags_of(change, found);
    return found;
  }

 private:
  // The plan with `change` and `ranks_per_node`, if it fits.
  std::optional<Plan> plan_of(const Change& change, int ranks_per_node) {
    const Run& run = change.dtype ? *narrow_ : run_;
    PlanOptions options = run.options;
    options.ranks_per_node = ranks_per_node;
    if (change.strategy != nullptr) options.strategy = change.strategy;
    if (change.format) options.after = {phase_of(change)};
    Plan plan = make_plan(run.checkpoint.manifest, run.recipe, run.layout, options);
    if (change.staging) {
      plan = shrunk_to_fit(std::move(plan), budget_, kMinStagingBytes);
    } else if (!run_.staging_given) {
      plan = shrunk_to_fit(std::move(plan), budget_);
    }
    if (!fits(plan.promise, budget_)) return std::nullopt;
    if (!fits_job_(changed_flags(change), run, plan.options)) return std::nullopt;
    return plan;
  }

  RunFlags changed_flags(const Change& change) const {
    RunFlags flags = flags_;
    if (change.dtype) flags.dtype = torch_name(kNarrowDType);
    if (change.format) flags.optimizer = fmt::format("adamw:{}", row_of(*change.format).name);
    return flags;
  }

  const Phase& phase_of(const Change& change) {
    const auto [at, is_new] = phases_.try_emplace({change.dtype, *change.format});
    if (is_new) at->second = step_phase_of(change.dtype ? *narrow_ : run_, *change.format);
    return at->second;
  }

  static std::string flags_of(const Change& change, const Alternative& found) {
    std::string flags;
    const auto add = [&flags](std::string_view flag, const auto& value) {
      flags += fmt::format("{}{} {}", flags.empty() ? "" : " ", flag, value);
    };
    if (change.staging) add("--staging", found.staging_bytes);
    if (change.strategy != nullptr) add("--strategy", found.strategy);
    if (change.dtype) add("--dtype", torch_name(kNarrowDType));
    if (change.format) add("--optimizer", fmt::format("adamw:{}", row_of(*change.format).name));
    if (change.nodes) add("--ranks-per-node", found.ranks_per_node);
    return flags;
  }

  const RunFlags& flags_;
  const Run& run_;
  const Run* const narrow_;
  const Budget& budget_;
  const FitsJob fits_job_;
  std::map<std::pair<bool, StateFormat>, Phase> phases_;  // by Change::dtype and format
};

}  // namespace

std::vector<Alternative> would_fit(const RunFlags& flags, const Run& run, const Budget& budget,
                                   FitsJob fits_job) {
  const std::optional<Run> narrow = narrower_run(flags, run);
  const Run* const narrow_run = narrow ? &*narrow : nullptr;
  Search search(flags, run, narrow_run, budget, fits_job);
  return cheapest(changes_of(run, narrow_run, budget), ranks_per_node_of(run),
                  [&](const Change& change) { return search.try_change(change); });
}

}  // namespace modicum
