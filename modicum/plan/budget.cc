// Whether a promise fits a budget, and what it lacks.
#include <fmt/format.h>

#include <algorithm>

#include "modicum/plan/plan.h"

namespace modicum {

int worst_node(const Promise& promise) {
  const std::vector<uint64_t> peaks = promise.node_peaks();
  return static_cast<int>(std::max_element(peaks.begin(), peaks.end()) - peaks.begin());
}

bool fits(const Promise& promise, const Budget& budget) {
  return promise.node_peak_bytes(worst_node(promise)) <= budget.bytes;
}

std::optional<Error> refusal_of(const Promise& promise, const Budget& budget) {
  const int node = worst_node(promise);
  const uint64_t need = promise.node_peak_bytes(node);
  if (need <= budget.bytes) return std::nullopt;
  Facts facts{.expected = fmt::format("{}", budget.bytes), .got = fmt::format("{}", need)};
  facts.shortfall_bytes = need - budget.bytes;
  facts.owners = peak_owners(promise, node);
  return Error(Category::budget,
               fmt::format("node {} needs {} and the budget ({}) is {}: {} too little; largest: {}",
                           node, format_size(need), budget.source, format_size(budget.bytes),
                           format_size(need - budget.bytes), peak_cause(promise, node)),
               std::move(facts));
}

void require_fits(const Promise& promise, const Budget& budget) {
  if (const auto refusal = refusal_of(promise, budget)) throw *refusal;
}

Plan shrunk_to_fit(Plan plan, const Budget& budget, uint64_t least_bytes) {
  const uint64_t staging = plan.options.staging_bytes;
  const uint64_t held = plan.staging.total_bytes;
  if (fits(plan.promise, budget) || staging <= least_bytes || held == 0) return plan;
  PlanOptions options = plan.options;
  const auto with_staging = [&](uint64_t bytes) {
    options.staging_bytes = bytes;
    return make_plan(*plan.manifest, *plan.recipe, plan.layout, options);
  };
  const int node = worst_node(plan.promise);
  const uint64_t peak = plan.promise.node_peak_bytes(node);
  const auto ranks = static_cast<uint64_t>(std::count(plan.promise.node_of_rank.begin(),
                                                      plan.promise.node_of_rank.end(),
                                                      static_cast<uint32_t>(node)));
  const uint64_t over = peak - budget.bytes;
  // A rank may hold only its part of the staging, as with a ring that all have made together.
  const uint64_t each =
      round_up((over + ranks - 1) / ranks, kPageBytes) * (round_up(staging, kPageBytes) / held);
  if (each < staging - least_bytes) {
    Plan less = with_staging(staging - each);
    if (fits(less.promise, budget)) return less;
  }
  Plan least = with_staging(least_bytes);
  const bool helps = least.promise.node_peak_bytes(worst_node(least.promise)) < peak;
  return helps ? std::move(least) : std::move(plan);
}

std::vector<Owner> peak_owners(const Promise& promise, int node) {
  Footprint sum;
  sum[Purpose::process] = promise.launcher_bytes;
  for (int rank = 0; rank < promise.ranks(); ++rank) {
    if (promise.node_of_rank[static_cast<size_t>(rank)] != static_cast<uint32_t>(node)) continue;
    sum += promise.peak_phase(rank).of_rank[static_cast<size_t>(rank)];
  }
  return owners_of(sum);
}

std::string peak_cause(const Promise& promise, int node) {
  std::string cause;
  const std::vector<Owner> owners = peak_owners(promise, node);
  for (size_t i = 0; i < std::min<size_t>(2, owners.size()); ++i) {
    cause +=
        fmt::format("{}{} {}", i == 0 ? "" : ", ", owners[i].purpose, format_size(owners[i].bytes));
  }
  return cause;
}

}  // namespace modicum
