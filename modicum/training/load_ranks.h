// Loads in rank processes of this machine. Part of the public header of `training`.
#pragma once

#include <optional>
#include <string>

#include "modicum/report/report.h"
#include "modicum/runs/runs.h"
#include "modicum/training/rank_processes.h"

namespace modicum {

// A load of `run` in all ranks. The plan must fit the budget.
struct LoadTask {
  const Run& run;
  const Plan& plan;
  int threads = 1;     // per rank
  bool check = false;  // poison the destination, then compare every value
  bool digest = false;
  std::string dump;           // a new directory for the shards of each rank; empty: no dump
  uint64_t budget_bytes = 0;  // per node, for `modicum watch`; 0: none
};
// If the run has an optimizer, allocates its state, but makes no step. On failure removes the
// directory `dump`. Throws the errors of run_ranks.
LoadReport load_in_ranks(const LoadTask& task, ShowBytes show);

}  // namespace modicum
