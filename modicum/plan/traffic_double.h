// The traffic of one rank, counted read by read: what `traffic` must add up to over the ranks.
#pragma once

#include <algorithm>
#include <vector>

#include "modicum/plan/plan.h"

namespace modicum {

// With own-shard or replica-striped. The ranks of a group take turns reading; with own-shard a
// group is one rank.
inline Traffic traffic_of_turns(const Plan& plan, int rank) {
  Traffic sum;
  const std::vector<int> group = exchange_group(plan, rank);
  std::vector<Transfer> table(kReadTableRows);
  size_t turn = 0;
  for_each_read(plan, rank, table, [&](const Read& read) {
    const bool reads = group[turn++ % group.size()] == rank;
    (reads ? sum.storage_read_bytes : sum.exchanged_bytes) += read.bytes();
    sum.reads += !reads ? 0 : read.scale.bytes() > 0 ? 2 : 1;  // scales take a second read
    sum.transfers += read.transfers.size();
    sum.needed_bytes += read.scale.bytes();
    for (const Transfer& t : read.transfers) sum.needed_bytes += bytes_of(t.from_dtype, t.numel());
  });
  return sum;
}

// With a strategy that reads whole tensors.
inline Traffic traffic_of_window(const Plan& plan, int rank) {
  Traffic sum;
  const RankWindow window(plan, rank);
  window.for_each_read([&](const RankWindow::Read& read) {
    sum.storage_read_bytes += read.at.bytes();
    sum.reads += 1;
  });
  if (reads_storage(plan, rank)) return sum;
  window.for_each_tensor([&](const RankWindow::Tensor& tensor) {
    const auto bytes = [&](uint32_t stored) { return plan.manifest->tensors[stored].at.bytes(); };
    sum.exchanged_bytes += bytes(tensor.elements.stored);
    if (tensor.scale) sum.exchanged_bytes += bytes(tensor.scale->stored);
  });
  return sum;
}

inline Traffic traffic_of_rank(const Plan& plan, int rank) {
  if (plan.strategy().of_reader != Window::none) return traffic_of_window(plan, rank);
  if (plan.strategy().reader != Reader::node_leader) return traffic_of_turns(plan, rank);
  Traffic sum;
  const int leader = node_of(plan, rank).first;
  for_each_node_read(plan, leader, [&](const NodeRead& read) {
    if (rank == leader) {
      sum.storage_read_bytes += read.bytes();
      sum.reads += read.scale.bytes() > 0 ? 2 : 1;
    } else {
      sum.exchanged_bytes += read.wanted[static_cast<size_t>(rank - leader)].bytes();
    }
  });
  return sum;
}

}  // namespace modicum
