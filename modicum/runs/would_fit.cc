#include "modicum/runs/would_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <map>
#include <utility>

#include "modicum/runs/runs.h"

namespace modicum {
namespace {

// A set of changes to the requested run.
struct Change {
  bool staging = false;  // less, down to kMinStagingBytes
  const Strategy* strategy = nullptr;
  std::optional<StateFormat> format;
  bool nodes = false;  // fewer ranks per node

  int count() const noexcept {
    return int{staging} + int{strategy != nullptr} + int{format.has_value()} + int{nodes};
  }
};

// All sets of changes, the smallest first.
std::vector<Change> changes_of(const Run& run, const Budget& budget) {
  std::vector<const Strategy*> others = {nullptr};
  for (const Strategy& strategy : strategies()) {
    if (&strategy != run.options.strategy) others.push_back(&strategy);
  }
  std::vector<std::optional<StateFormat>> formats = {std::nullopt};
  for (const StateFormatRow& row : state_formats()) {
    if (run.optimizer && row.format != *run.optimizer) formats.emplace_back(row.format);
  }
  std::vector<Change> changes;
  for (const bool nodes : {false, true}) {
    if (nodes && budget.is_shared) continue;  // all nodes share this machine
    for (const auto& format : formats) {
      for (const Strategy* strategy : others) {
        for (const bool staging : {false, true}) {
          changes.push_back({staging, strategy, format, nodes});
        }
      }
    }
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const Change& a, const Change& b) { return a.count() < b.count(); });
  return changes;
}

class Search {
 public:
  Search(const Run& run, const Budget& budget) : run_(run), budget_(budget) {}

  std::optional<Alternative> try_change(const Change& change) {
    const int asked = per_node(run_.options.ranks_per_node);
    const std::optional<Plan> plan =
        change.nodes ? with_fewer_per_node(change, asked) : plan_of(change, asked);
    if (!plan || (change.staging && plan->options.staging_bytes >= run_.options.staging_bytes)) {
      return std::nullopt;
    }
    Alternative found{.strategy = plan->strategy().name,
                      .staging_bytes = plan->options.staging_bytes,
                      .state_format = change.format ? change.format : run_.optimizer,
                      .ranks_per_node = per_node(plan->options.ranks_per_node),
                      .peak_bytes = plan->promise.node_peak_bytes(worst_node(plan->promise))};
    found.flags = flags_of(change, found);
    return found;
  }

 private:
  int per_node(int ranks) const noexcept { return ranks > 0 ? ranks : run_.layout.world_size(); }

  // The plan with `change` and `ranks_per_node`, if it fits.
  std::optional<Plan> plan_of(const Change& change, int ranks_per_node) {
    PlanOptions options = run_.options;
    options.ranks_per_node = ranks_per_node;
    if (change.strategy != nullptr) options.strategy = change.strategy;
    if (change.format) options.after = {phase_of(*change.format)};
    Plan plan = make_plan(run_.checkpoint.manifest, run_.recipe, run_.layout, options);
    if (change.staging) {
      plan = shrunk_to_fit(std::move(plan), budget_, kMinStagingBytes);
    } else if (!run_.staging_given) {
      plan = shrunk_to_fit(std::move(plan), budget_);
    }
    if (!fits(plan.promise, budget_)) return std::nullopt;
    return plan;
  }

  // The plan with `change` and the most ranks per node below `asked` that fit, by binary search.
  std::optional<Plan> with_fewer_per_node(const Change& change, int asked) {
    if (asked < 2) return std::nullopt;
    int most = 1;
    std::optional<Plan> best = plan_of(change, most);
    for (int too_many = asked; best && most + 1 < too_many;) {
      const int middle = most + (too_many - most) / 2;
      if (auto plan = plan_of(change, middle)) {
        most = middle;
        best = std::move(plan);
      } else {
        too_many = middle;
      }
    }
    return best;
  }

  const Phase& phase_of(StateFormat format) {
    const auto [at, is_new] = phases_.try_emplace(format);
    if (is_new) at->second = step_phase(run_.recipe, run_.layout, format);
    return at->second;
  }

  static std::string flags_of(const Change& change, const Alternative& found) {
    std::string flags;
    const auto add = [&flags](std::string_view flag, const auto& value) {
      flags += fmt::format("{}{} {}", flags.empty() ? "" : " ", flag, value);
    };
    if (change.staging) add("--staging", found.staging_bytes);
    if (change.strategy != nullptr) add("--strategy", found.strategy);
    if (change.format) add("--optimizer", fmt::format("adamw:{}", row_of(*change.format).name));
    if (change.nodes) add("--ranks-per-node", found.ranks_per_node);
    return flags;
  }

  const Run& run_;
  const Budget& budget_;
  std::map<StateFormat, Phase> phases_;
};

}  // namespace

std::vector<Alternative> would_fit(const Run& run, const Budget& budget) {
  std::vector<Alternative> found;
  Search search(run, budget);
  int changed = INT_MAX;
  for (const Change& change : changes_of(run, budget)) {
    if (change.count() == 0) continue;
    if (change.count() > changed) break;
    if (auto alternative = search.try_change(change)) {
      changed = change.count();
      found.push_back(std::move(*alternative));
    }
  }
  return found;
}

}  // namespace modicum
