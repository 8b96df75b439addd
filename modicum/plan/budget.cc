// Compares a promise with a budget, and computes the shortfall.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {

int worst_node(const Promise& promise) {
  const std::vector<uint64_t> peaks = promise.node_peaks();
  return static_cast<int>(std::max_element(peaks.begin(), peaks.end()) - peaks.begin());
}

bool fits(const Promise& promise, const Budget& budget) {
  return promise.node_peak_bytes(worst_node(promise)) <= budget.bytes;
}

namespace {

std::string largest_purposes(std::span<const Owner> owners) {
  return largest_owners(owners, [](std::string_view purpose) { return std::string(purpose); });
}

}  // namespace

std::optional<Error> refusal_of(Need need, const Budget& budget) {
  if (need.bytes <= budget.bytes) return std::nullopt;
  const uint64_t shortfall = need.bytes - budget.bytes;
  std::string text = fmt::format("{}{}{}: {}; largest: {}", need.who, need.when.empty() ? "" : " ",
                                 need.when, over_budget(budget.bytes, need.bytes, budget.source),
                                 largest_purposes(need.owners));
  Facts facts{.expected = fmt::format("{}", budget.bytes), .got = fmt::format("{}", need.bytes)};
  facts.shortfall_bytes = shortfall;
  facts.owners = std::move(need.owners);
  return Error(Category::budget, std::move(text), std::move(facts));
}

std::optional<Error> refusal_of(const Promise& promise, const Budget& budget) {
  const int node = worst_node(promise);
  return refusal_of({.who = fmt::format("node {}", node),
                     .bytes = promise.node_peak_bytes(node),
                     .owners = owners_of(promise.on_node(node))},
                    budget);
}

void require_fits(const Promise& promise, const Budget& budget) {
  if (const auto refusal = refusal_of(promise, budget)) throw *refusal;
}

namespace {

// The bytes of --staging that a rank holds in a phase of the promise.
uint64_t staging_in(const Plan& plan, std::string_view phase) {
  if (phase == "open" || phase == "hold") return 0;
  if (phase == "load") return plan.staging.total_bytes;
  const uint64_t ring = plan.staging.ring_part_bytes;
  if (phase != "save" || (*plan.options.save)[Purpose::staging] > 0) return ring;
  return ring + round_up(plan.options.staging_bytes, kPageBytes);
}

// How far --staging must shrink, so that the rank holds at most its peak less `less_bytes` in every
// phase. UINT64_MAX if a phase that holds no staging is higher than that.
uint64_t reduction_of(const Plan& plan, int rank, uint64_t less_bytes) {
  const uint64_t asked = round_up(plan.options.staging_bytes, kPageBytes);
  const uint64_t peak = plan.promise.rank_peak_bytes(rank);
  uint64_t reduction = 0;
  for (const Phase& phase : plan.promise.phases) {
    const uint64_t rank_bytes = phase.of_rank[static_cast<size_t>(rank)].total();
    if (rank_bytes + less_bytes <= peak) continue;
    const uint64_t staging = staging_in(plan, phase.name);
    if (staging == 0) return UINT64_MAX;
    const uint64_t over = round_up(rank_bytes + less_bytes - peak, kPageBytes);
    const double of_asked = static_cast<double>(asked) / static_cast<double>(staging);
    const auto bytes = static_cast<uint64_t>(std::ceil(static_cast<double>(over) * of_asked));
    reduction = std::max(reduction, round_up(bytes, kPageBytes));
  }
  return reduction;
}

}  // namespace

// Two worked examples: 4 ranks on a node, --staging 8 MiB, the node 5 MiB over budget. Each rank
// must hold 5 / 4 = 1.25 MiB less.
//
//                               own-shard                 rank0-broadcast
//   a rank's staging            all of --staging: 8 MiB   its ring part: 8 / 4 = 2 MiB
//   --staging / its staging     8 / 8 = 1                 8 / 2 = 4
//   --staging must be less by   1.25 * 1 = 1.25 MiB       1.25 * 4 = 5 MiB
//   new --staging               6.75 MiB                  3 MiB
//   a rank's new staging        6.75 MiB                  3 / 4 = 0.75 MiB
//
// A save holds all of --staging, with every strategy. The plan with `least_bytes` is returned if a
// larger reduction is needed, or if rounding to pages leaves the peak just over the budget.
Plan shrunk_to_fit(Plan plan, const Budget& budget, uint64_t least_bytes) {
  const uint64_t asked = plan.options.staging_bytes;
  if (fits(plan.promise, budget) || asked <= least_bytes) return plan;
  const auto with_staging = [&](uint64_t bytes) {
    PlanOptions options = plan.options;
    options.staging_bytes = bytes;
    return make_plan(*plan.manifest, *plan.recipe, plan.layout, std::move(options));
  };
  const int worst = worst_node(plan.promise);
  const uint64_t peak = plan.promise.node_peak_bytes(worst);
  const int first = worst * ranks_per_node(plan);  // not node_of: rank 0 may read for all nodes
  const NodeRanks node{first, std::min(plan.ranks(), first + ranks_per_node(plan))};
  const auto ranks = static_cast<uint64_t>(node.end - node.first);
  const uint64_t less_per_rank = round_up((peak - budget.bytes + ranks - 1) / ranks, kPageBytes);
  uint64_t less = 0;  // of --staging
  for (int rank = node.first; rank < node.end; ++rank) {
    less = std::max(less, reduction_of(plan, rank, less_per_rank));
  }
  if (less < asked - least_bytes) {
    Plan shrunk = with_staging(asked - less);
    if (fits(shrunk.promise, budget)) return shrunk;
  }
  Plan least = with_staging(least_bytes);
  const bool helps = least.promise.node_peak_bytes(worst_node(least.promise)) < peak;
  return helps ? std::move(least) : std::move(plan);
}

std::string largest_owners(std::span<const Owner> owners,
                           FunctionRef<std::string(std::string_view)> named) {
  std::string cause;
  for (size_t i = 0; i < std::min<size_t>(2, owners.size()); ++i) {
    cause += fmt::format("{}{} {}", i == 0 ? "" : ", ", named(owners[i].purpose),
                         format_size(owners[i].bytes));
  }
  return cause;
}

std::string peak_cause(const Promise& promise, int node) {
  return largest_purposes(owners_of(promise.on_node(node)));
}

}  // namespace modicum
