// The common part of rank processes that load. Internal to `training`.
#pragma once

#include <memory>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/training/compared_pages.h"
#include "modicum/training/load_ranks.h"
#include "modicum/training/rank_load.h"

namespace modicum {

struct LoadWorld : World {
  explicit LoadWorld(const LoadTask& load_task)
      : World(load_task.plan.ranks(), load_task.run_ranks),
        task(load_task),
        rings(load_task.plan),
        compared(load_task.run.checkpoint.manifest, load_task.plan.ranks()) {
    budget_bytes = load_task.budget_bytes;
    const Promise& promise = load_task.plan.promise;
    const int node = worst_node(promise);
    need = fmt::format("the plan needs {} ({})", format_size(promise.node_peak_bytes(node)),
                       peak_cause(promise, node));
  }

  const LoadTask& task;
  Rings rings;
  const ComparedPages compared;
};

// A rank's ledger, its exchange and its load.
struct LoadingRank {
  LoadingRank(LoadWorld& world, int rank, HostSink::Copy copy = {})
      // The kernel's peak counts from here on.
      : baseline_bytes((reset_peak_rss(), read_process_memory().held_bytes())),
        ledger(world.task.plan.promise.ledger_limit_bytes(rank), world.reporter(rank)),
        exchange(world.rings.end_of(rank, world.board)),
        load({world.task.run.checkpoint,
              world.task.plan,
              {rank, &world.board, exchange.get(), &ledger},
              world.clock,
              {.threads = world.task.threads},
              world.task.check},
             {}, std::move(copy)) {
    load.outcome().baseline_bytes = baseline_bytes;
    if (const auto& resume = world.task.run.options.resume) {
      resumed = ledger.adopt(Purpose::header, (*resume)[Purpose::header]);
    }
  }

  // Returns `outcome` with the peaks since the last call, at first since construction. All ranks
  // call it at the same time, and none goes on until all have read their peaks.
  RankOutcome phase_of(RankOutcome outcome, Board& board) {
    board.barrier(outcome.rank);
    outcome.ledger_peak_bytes = ledger.peak_since_mark();
    outcome.kernel_peak_bytes = read_process_memory().peak_held();
    board.barrier(outcome.rank);  // shared pages stay mapped until all have read their peaks
    ledger.mark();
    reset_peak_rss();
    return outcome;
  }
  // The outcome of a phase without a load.
  RankOutcome later_phase(Board& board) {
    const RankOutcome& loaded = load.outcome();
    return phase_of(
        {.rank = loaded.rank, .pid = loaded.pid, .baseline_bytes = loaded.baseline_bytes}, board);
  }

  const uint64_t baseline_bytes;  // held before any allocation of the load
  Ledger ledger;
  Charge resumed;  // what the launcher holds of a checkpoint's state until it ends
  const std::unique_ptr<Exchange> exchange;
  RankLoad load;
};

}  // namespace modicum
