// Selects the cheapest of many changes to a run, by trying them. Internal to `runs`.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "modicum/report/report.h"

namespace modicum {

// The result of `try_count` with the most ranks per node, below `asked`, for which it returns one,
// by binary search. Nodes have equally many of the `world` ranks, as a launcher such as torchrun
// starts them.
template <typename TryCount>
auto most_per_node(int world, int asked, const TryCount& try_count) -> decltype(try_count(asked)) {
  std::vector<int> counts;
  for (int count = 1; count < asked; ++count) {
    if (world % count == 0) counts.push_back(count);
  }
  decltype(try_count(asked)) best;
  for (size_t most = 0, too_many = counts.size(); most < too_many;) {
    const size_t middle = most + (too_many - most) / 2;
    if (auto found = try_count(counts[middle])) {
      best = std::move(found);
      most = middle + 1;
    } else {
      too_many = middle;
    }
  }
  return best;
}

// Appends the changes with more nodes, in which `nodes` is set, and sorts all by their rank.
// `has_nodes`: whether there can be more.
template <typename Change>
void add_nodes_and_sort(std::vector<Change>& changes, bool has_nodes) {
  if (has_nodes) {
    std::vector<Change> with_nodes = changes;
    for (Change& change : with_nodes) change.nodes = true;
    changes.insert(changes.end(), with_nodes.begin(), with_nodes.end());
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const Change& a, const Change& b) { return a.rank() < b.rank(); });
}

// The cheapest of `changes`, sorted by rank, for which `try_change` returns an Alternative. Of
// those with more nodes, only those on the fewest nodes, and of these the ones with the fewest
// changes. `asked`: ranks per node of the requested run.
template <typename Change, typename TryChange>
std::vector<Alternative> cheapest(const std::vector<Change>& changes, int asked,
                                  const TryChange& try_change) {
  std::vector<Alternative> found;
  const auto has_more_nodes = [&](const Alternative& alternative) {
    return alternative.ranks_per_node < asked;
  };
  const Change* last = nullptr;  // the preferred one that fits, with as many nodes
  std::pair fewest(0, 0);        // ranks per node, and changes, of those with more nodes
  for (const Change& change : changes) {
    if (change.count() == 0 || (last != nullptr && change.is_dearer_than(*last))) continue;
    std::optional<Alternative> alternative = try_change(change);
    if (!alternative) continue;
    if (last == nullptr || last->nodes != change.nodes) last = &change;
    if (change.nodes) {
      const std::pair place(alternative->ranks_per_node, -change.count());
      if (place < fewest) continue;
      if (place > fewest) std::erase_if(found, has_more_nodes);
      fewest = place;
    }
    found.push_back(std::move(*alternative));
  }
  return found;
}

}  // namespace modicum
