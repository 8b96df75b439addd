#include "modicum/training/rank_processes.h"

#include <fmt/format.h>
#include <unistd.h>

#include "modicum/probe/probe.h"

namespace modicum {

void run_watched(World& world, FunctionRef<void(int rank)> body, ShowBytes show) {
  SuperviseOptions options;
  options.tick = [&board = world.board, show] {
    uint64_t bytes = 0;
    for (int rank = 0; rank < board.ranks(); ++rank) bytes += board.progress(rank);
    show(bytes);
  };
  options.grace_ns = world.grace_ns;
  options.out_of_memory = [before = oom_kill_count()] {
    if (oom_kill_count() == before) return std::string();
    const std::vector<MemoryLimit> limits = memory_limits();
    if (limits.empty()) return std::string("the kernel counted an out-of-memory kill");
    return fmt::format("{} allows {}", limits[0].source, format_size(limits[0].limit_bytes));
  };
  auto reporting = [&world, body](int rank) {
    world.own_report.begin([] { return read_pss(getpid()).value_or(0); });
    world.own_report.reporter().set_budget(world.budget_bytes);
    body(rank);
  };
  world.begin_ns = world.clock.now_ns();
  run_ranks(world.board, world.clock, reporting, options);
}

}  // namespace modicum
