// The ranks that read, and the groups of ranks that exchange.
#include <algorithm>
#include <numeric>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr std::array<Strategy, 5> kStrategies = {{
    {"full-per-rank", Reader::every_rank, Window::whole_model, Window::whole_model},
    {"rank0-broadcast", Reader::rank_0, Window::whole_model, Window::one_tensor},
    {"own-shard", Reader::every_rank, Window::none, Window::none},
    {"node-reader", Reader::node_leader, Window::none, Window::none},
    {"replica-striped", Reader::replicas, Window::none, Window::none},
}};

}  // namespace

std::span<const Strategy> strategies() noexcept { return kStrategies; }

const Strategy& strategy_named(std::string_view name) {
  return row_named("strategy", name, kStrategies);
}

int ranks_per_node(const Plan& plan) noexcept {
  return plan.options.ranks_per_node > 0 ? plan.options.ranks_per_node : plan.ranks();
}

NodeRanks node_of(const Plan& plan, int rank) {
  checked_rank(rank, plan.ranks());
  if (plan.manifest->only_rank_0) return {0, plan.ranks()};
  const int first = rank / ranks_per_node(plan) * ranks_per_node(plan);
  return {first, std::min(plan.ranks(), first + ranks_per_node(plan))};
}

std::vector<int> exchange_group(const Plan& plan, int rank) {
  checked_rank(rank, plan.ranks());
  NodeRanks group{rank, rank + 1};
  switch (plan.strategy().reader) {
    case Reader::every_rank: break;
    case Reader::rank_0: group = {0, plan.ranks()}; break;
    case Reader::node_leader: group = node_of(plan, rank); break;
    case Reader::replicas: return replicas_of(plan.layout, rank);
  }
  std::vector<int> ranks(static_cast<size_t>(group.end - group.first));
  std::iota(ranks.begin(), ranks.end(), group.first);
  return ranks;
}

bool reads_alone(const Plan& plan, int rank) {
  const NodeRanks node = node_of(plan, rank);
  for (int other = node.first; other < node.end; ++other) {
    if (other != rank && reads_storage(plan, other)) return false;
  }
  return reads_storage(plan, rank);
}

bool reads_storage(const Plan& plan, int rank) {
  checked_rank(rank, plan.ranks());
  switch (plan.strategy().reader) {
    case Reader::every_rank:
    case Reader::replicas: break;
    case Reader::rank_0: return rank == 0;
    case Reader::node_leader: return rank == node_of(plan, rank).first;
  }
  return true;
}

}  // namespace modicum
