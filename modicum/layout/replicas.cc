// The ranks that hold the same elements: those that differ only along mesh axes without a cut.
#include <utility>

#include "modicum/layout/layout.h"

namespace modicum {
namespace {

// By mesh axis: whether it has a cut.
std::vector<bool> cut_axes(const Sharding& sharding) {
  std::vector<bool> cuts(sharding.mesh.sizes.size());
  for (const Cut& cut : sharding.cuts) {
    for (const int axis : cut.axes) cuts[static_cast<size_t>(axis)] = true;
  }
  return cuts;
}

bool are_replicas(const Sharding& sharding, int rank, int other) {
  const std::vector<bool> cuts = cut_axes(sharding);
  int inner = 1;
  for (size_t axis = cuts.size(); axis-- > 0; inner *= sharding.mesh.sizes[axis]) {
    const int size = sharding.mesh.sizes[axis];
    if (cuts[axis] && rank / inner % size != other / inner % size) return false;
  }
  return true;
}

}  // namespace

std::vector<int> replicas_of(const Sharding& sharding, int rank) {
  const std::vector<bool> cuts = cut_axes(sharding);
  std::vector<int> ranks = {0};
  int inner = sharding.mesh.world_size();  // in the loop: ranks along the axes inside `axis`
  for (size_t axis = 0; axis < cuts.size(); ++axis) {
    const int size = sharding.mesh.sizes[axis];
    inner /= size;
    const int coordinate = rank / inner % size;
    std::vector<int> further;
    for (const int outer : ranks) {
      for (int i = cuts[axis] ? coordinate : 0; i < (cuts[axis] ? coordinate + 1 : size); ++i) {
        further.push_back(outer + i * inner);
      }
    }
    ranks = std::move(further);
  }
  return ranks;
}

std::vector<int> replicas_of(const Layout& layout, int rank) {
  if (!layout.flats.empty()) return {rank};
  std::vector<int> ranks = replicas_of(layout.kinds.front(), rank);
  for (const Sharding& sharding : layout.kinds) {
    std::erase_if(ranks, [&](int other) { return !are_replicas(sharding, rank, other); });
  }
  return ranks;
}

void for_each_replica_group(const Layout& layout,
                            FunctionRef<void(std::span<const int> ranks)> fn) {
  const int world = layout.world_size();
  std::vector<bool> is_done(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    if (is_done[static_cast<size_t>(rank)]) continue;
    const std::vector<int> group = replicas_of(layout, rank);
    for (const int replica : group) is_done[static_cast<size_t>(replica)] = true;
    fn(group);
  }
}

ReplicaPlace replica_place(const Sharding& sharding, const TensorSpec& target, int rank) {
  // No cut applies to a 0-d tensor, unless it is flattened.
  const bool is_cut = sharding.flattens || !target.shape.empty();
  const std::vector<bool> cuts =
      is_cut ? cut_axes(sharding) : std::vector<bool>(sharding.mesh.sizes.size());
  ReplicaPlace place;
  int inner = sharding.mesh.world_size();  // in the loop: ranks along the axes inside `axis`
  for (size_t axis = 0; axis < cuts.size(); ++axis) {
    const int size = sharding.mesh.sizes[axis];
    inner /= size;
    if (cuts[axis]) continue;
    place.index = place.index * size + rank / inner % size;
    place.count *= size;
  }
  return place;
}

}  // namespace modicum
