// Inside the room `plan`: what its files share and no other room needs.
#pragma once

#include "modicum/plan/plan.h"

namespace modicum {

// The ranks [first, end) of one node.
struct NodeRanks {
  int first = 0;
  int end = 0;
};
int ranks_per_node(const Plan& plan) noexcept;
NodeRanks node_of(const Plan& plan, int rank) noexcept;

// Those of for_each_node_read that are for one target.
void for_each_node_read_of(const Plan& plan, int rank, uint32_t target,
                           FunctionRef<void(const NodeRead&)> fn);

}  // namespace modicum
