#include "modicum/training/norm_page.h"

#include <sched.h>

#include <algorithm>

namespace modicum {

NormPage::NormPage(int ranks)
    : ranks_(ranks),
      mapping_(Mapping::shared(sizeof(std::atomic<uint64_t>) +
                               2 * static_cast<uint64_t>(ranks) * sizeof(Lane))) {}

std::atomic<uint64_t>& NormPage::arrived() const noexcept {
  return *reinterpret_cast<std::atomic<uint64_t>*>(mapping_.bytes().data());
}

NormPage::Lane& NormPage::lane(int64_t step, int rank) const noexcept {
  auto* const lanes =
      reinterpret_cast<Lane*>(mapping_.bytes().data() + sizeof(std::atomic<uint64_t>));
  return lanes[(step % 2) * ranks_ + rank];
}

GradNorm NormPage::norm(int64_t step) const noexcept {
  GradNorm sum;
  for (int rank = 0; rank < ranks_; ++rank) sum += lane(step, rank).norm;
  return sum;
}

double NormPage::slowest_s(int64_t step) const noexcept {
  double slowest = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    slowest = std::max(slowest, lane(step, rank).last_step_s);
  }
  return slowest;
}

void NormPage::line_up(const Board& board) const {
  const auto ranks = static_cast<uint64_t>(ranks_);
  const uint64_t ticket = arrived().fetch_add(1);
  const uint64_t all = (ticket / ranks + 1) * ranks;
  for (int spins = 1; arrived().load() < all; ++spins) {
    if (spins % 1024 == 0) board.check();
    sched_yield();
  }
}

}  // namespace modicum
