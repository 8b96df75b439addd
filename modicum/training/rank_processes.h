// The common parts of all commands that start rank processes. Part of the public header of
// `training`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "modicum/probe/probe.h"
#include "modicum/ranks/ranks.h"
#include "modicum/report/report.h"

namespace modicum {

// Called about every 100 ms with the progress of all ranks together, in bytes.
using ShowBytes = FunctionRef<void(uint64_t bytes)>;

// Shared by the ranks of a command. Construct it before they begin.
struct World {
  World(int ranks, RankRunner runner);

  double seconds_until(int64_t end_ns) const noexcept {
    return static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  }

  // Of this process, the launcher. Call it after outcomes_of.
  LauncherMemory launcher_memory() const {
    return {launcher_with_ranks, read_process_memory().peak_held()};
  }

  const Reporter& reporter(int rank) const noexcept {
    return own_reports[static_cast<size_t>(rank)].reporter();
  }

  const RankRunner run_ranks;
  const int launcher_pid;
  SteadyClock clock;
  SharedBoard board;
  int64_t begin_ns = 0;                // time just before the ranks begin
  std::function<int64_t()> grace_ns;   // see SuperviseOptions
  uint64_t budget_bytes = 0;           // budget of the node, for the report; 0: none
  std::string need;                    // text of an error: the memory that the plan needs; or empty
  std::vector<OwnReport> own_reports;  // by rank; each rank begins its own
  CgroupPeak cgroup_peak;              // since construction
  uint64_t launcher_with_ranks = 0;    // see LauncherMemory
};

// Calls world.run_ranks, and `show` with the progress. If the kernel's OOM killer has killed a
// rank, the error names the memory limit, `world.need` and the progress.
void run_watched(World& world, FunctionRef<void(int rank)> body, ShowBytes show);

// In each rank, constructs a Rank(world, rank) and calls its live(), which does all the
// work of the rank. Returns the results by rank; they must be trivially copyable. Every Rank object
// lives until all ranks have returned from live(). Throws the errors of run_ranks.
template <typename Rank, typename OfWorld>
auto outcomes_of(OfWorld& world, ShowBytes show) {
  struct RankResult {
    decltype(std::declval<Rank&>().live()) outcome;
    uint64_t launcher_bytes;  // of rank 0
  };
  run_watched(
      world,
      [&world](int rank) {
        Rank process(world, rank);
        RankResult result{process.live(), 0};
        if (rank == 0) result.launcher_bytes = read_process_memory(world.launcher_pid).held_bytes();
        world.board.post_value(rank, result);
        world.board.barrier(rank);
      },
      show);
  std::vector<decltype(RankResult::outcome)> outcomes;
  for (int rank = 0; rank < world.board.ranks(); ++rank) {
    const auto result = world.board.template posted_value<RankResult>(rank);
    outcomes.push_back(result.outcome);
    if (rank == 0) world.launcher_with_ranks = result.launcher_bytes;
  }
  return outcomes;
}

}  // namespace modicum
