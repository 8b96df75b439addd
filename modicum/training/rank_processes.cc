#include "modicum/training/rank_processes.h"

#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include "modicum/probe/probe.h"

namespace modicum {

namespace {

uint64_t progress_of(const SharedBoard& board) {
  uint64_t bytes = 0;
  for (int rank = 0; rank < board.ranks(); ++rank) bytes += board.progress(rank);
  return bytes;
}

}  // namespace

World::World(int ranks, RankRunner runner)
    : run_ranks(runner),
      launcher_pid(getpid()),
      board(ranks, clock),
      own_reports(static_cast<size_t>(ranks)) {}

void run_watched(World& world, FunctionRef<void(int rank)> body, ShowBytes show) {
  SuperviseOptions options;
  options.tick = [&board = world.board, show] { show(progress_of(board)); };
  options.grace_ns = world.grace_ns;
  options.out_of_memory = [&world, before = oom_kills_in_group()] {
    if (oom_kills_in_group() == before) return std::string();
    // The first limit has the least memory left: probably the one that the killed rank exceeded.
    const std::vector<MemoryLimit> limits = memory_limits();
    std::string reason = limits.empty() ? "the kernel counted an out-of-memory kill"
                                        : fmt::format("{} allows {}", limits[0].source,
                                                      format_size(limits[0].limit_bytes));
    if (!world.need.empty()) reason += "; " + world.need;
    return fmt::format("{}; {} had been read or written", reason,
                       format_size(progress_of(world.board)));
  };
  auto reporting = [&world, body](int rank) {
    world.own_reports[static_cast<size_t>(rank)].begin(
        [] { return read_pss(getpid()).value_or(0); });
    world.reporter(rank).set_budget(world.budget_bytes);
    body(rank);
  };
  malloc_trim(0);  // the ranks would inherit what malloc retains
  world.begin_ns = world.clock.now_ns();
  world.run_ranks(world.board, world.clock, reporting, options);
}

}  // namespace modicum
