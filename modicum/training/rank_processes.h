// The common parts of all verbs that start rank processes. Part of the door of `training`.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "modicum/probe/probe.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// Called about every 100 ms with the progress of all ranks together, in bytes.
using ShowBytes = FunctionRef<void(uint64_t bytes)>;

// Shared by the rank processes of a verb. Construct before the fork.
struct World {
  explicit World(int ranks) : board(ranks, clock) {}

  double seconds_until(int64_t end_ns) const noexcept {
    return static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  }

  SteadyClock clock;
  SharedBoard board;
  int64_t begin_ns = 0;               // just before the first fork
  std::function<int64_t()> grace_ns;  // after SIGTERM: see SuperviseOptions
  uint64_t budget_bytes = 0;          // of the node, to be reported; 0: none
  OwnReport own_report;               // of a rank, in its process
  CgroupPeak cgroup_peak;             // from here on
};

// run_ranks with progress; a kill by the kernel's OOM killer is reported as such.
void run_watched(World& world, FunctionRef<void(int rank)> body, ShowBytes show);

// Runs Rank(world, rank).live(), which returns plain data, in a process per rank. Every Rank lives
// until all ranks have returned from live(). Returns the results by rank. Errors as those of
// run_ranks.
template <typename Rank, typename OfWorld>
auto outcomes_of(OfWorld& world, ShowBytes show) {
  using Outcome = decltype(std::declval<Rank&>().live());
  run_watched(
      world,
      [&world](int rank) {
        Rank process(world, rank);
        world.board.post_value(rank, process.live());
        world.board.barrier(rank);
      },
      show);
  std::vector<Outcome> outcomes;
  for (int rank = 0; rank < world.board.ranks(); ++rank) {
    outcomes.push_back(world.board.template posted_value<Outcome>(rank));
  }
  return outcomes;
}

}  // namespace modicum
