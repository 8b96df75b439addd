#include "modicum/stream/rings.h"

#include <algorithm>

namespace modicum {

Rings::Rings(const Plan& plan) : plan_(plan) {
  if (plan.staging.ring_part_bytes == 0) return;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const std::vector<int> group = exchange_group(plan, rank);
    rings_.try_emplace(group.front(), static_cast<int>(group.size()), plan.staging.ring_part_bytes);
  }
}

std::unique_ptr<Exchange> Rings::end_of(int rank, Board& board) {
  if (rings_.empty()) return nullptr;
  const std::vector<int> group = exchange_group(plan_, rank);
  const auto place = std::find(group.begin(), group.end(), rank) - group.begin();
  return std::make_unique<RingExchange>(rings_.at(group.front()), board, rank,
                                        static_cast<int>(place));
}

Gathers::Gathers(const Plan& saved) : plan_(saved) {
  if (saved.staging.gather_part_bytes == 0) return;
  for (int rank = 0; rank < saved.ranks(); rank = node_of(saved, rank).end) {
    nodes_.try_emplace(rank, node_of(saved, rank).end - rank, saved.staging.gather_part_bytes);
  }
}

std::unique_ptr<Gather> Gathers::end_of(int rank, Board& board) {
  if (nodes_.empty()) return nullptr;
  const int first = node_of(plan_, rank).first;
  return std::make_unique<Gather>(nodes_.at(first), board, rank, rank - first);
}

}  // namespace modicum
