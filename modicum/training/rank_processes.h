// What all kinds of rank processes share. Part of the door of `training`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "modicum/ranks/ranks.h"

namespace modicum {

// Called every 100 ms or so with the bytes that all ranks together have done.
using ShowBytes = FunctionRef<void(uint64_t bytes)>;

// What the rank processes of a verb share, made before they are forked.
struct World {
  explicit World(int ranks) : board(ranks, clock) {}

  double seconds_until(int64_t end_ns) const noexcept {
    return static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  }

  SteadyClock clock;
  SharedBoard board;
  int64_t begin_ns = 0;  // just before the first fork
};

// run_ranks, showing progress and telling a kill by the kernel for lack of memory.
void run_watched(World& world, FunctionRef<void(int rank)> body, ShowBytes show);

// In a process for each rank: Rank(world, rank).live(), whose result is plain data. Each rank keeps
// what it holds until the last one has finished. Returns the results by rank; errors as run_ranks'.
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
