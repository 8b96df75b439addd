// The exchanges of ranks on one machine, one per exchange group of a plan.
#pragma once

#include <map>
#include <memory>

#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// One ring in shared memory for each exchange group. Construct before the ranks are forked; must
// outlive every Exchange from end_of.
class Rings {
 public:
  explicit Rings(const Plan& plan);
  explicit Rings(const Plan&&) = delete;
  // The Exchange of `rank`; null if the plan has no exchange.
  std::unique_ptr<Exchange> end_of(int rank, Board& board);

 private:
  const Plan& plan_;
  std::map<int, SharedRing> rings_;  // by the first rank of the group
};

// The same for the short runs of a save: a SharedGather for each node.
class Gathers {
 public:
  explicit Gathers(const Plan& saved);
  explicit Gathers(const Plan&&) = delete;
  // The end of `rank`; null if the save does not gather.
  std::unique_ptr<Gather> end_of(int rank, Board& board);

 private:
  const Plan& plan_;
  std::map<int, SharedGather> nodes_;  // by first rank
};

}  // namespace modicum
