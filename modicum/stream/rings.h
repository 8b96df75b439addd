// The exchanges of ranks on one machine, as a plan groups them.
#pragma once

#include <map>
#include <memory>

#include "modicum/plan/plan.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// One ring in shared memory for each group of ranks that exchange. Made before the ranks are
// forked; outlives their ends.
class Rings {
 public:
  explicit Rings(const Plan& plan);
  explicit Rings(const Plan&&) = delete;
  // The end of `rank`; null where it sends and receives nothing.
  std::unique_ptr<Exchange> end_of(int rank, Board& board);

 private:
  const Plan& plan_;
  std::map<int, SharedRing> rings_;  // by the first rank of the group
};

}  // namespace modicum
