// The shared memory through which ranks on one machine exchange bytes, for a load and for a save.
#pragma once

#include <map>
#include <memory>

#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// One ring in shared memory for each exchange group of a plan. Construct it before the ranks are
// forked. It must outlive every Exchange from end_of.
class Rings {
 public:
  explicit Rings(const Plan& plan);
  explicit Rings(const Plan&&) = delete;
  // The Exchange of `rank`; null if the plan has no ring.
  std::unique_ptr<Exchange> end_of(int rank, Board& board);

 private:
  const Plan& plan_;
  std::map<int, SharedRing> rings_;  // by the first rank of the group
};

// One SharedGather for each node, in which a save collects short runs. Construct it before the
// ranks are forked. It must outlive every Gather from end_of.
class Gathers {
 public:
  explicit Gathers(const Plan& saved);
  explicit Gathers(const Plan&&) = delete;
  // The Gather of `rank`; null if the save does not gather.
  std::unique_ptr<Gather> end_of(int rank, Board& board);

 private:
  const Plan& plan_;
  std::map<int, SharedGather> nodes_;  // by the first rank of the node
};

}  // namespace modicum
