// Loading in rank processes of this machine. Part of the door of `training`.
#pragma once

#include <optional>
#include <string>

#include "modicum/report/report.h"
#include "modicum/runs/runs.h"
#include "modicum/training/rank_processes.h"

namespace modicum {

// A load of `run` in all ranks. The plan fits the budget.
struct LoadTask {
  const Run& run;
  const Plan& plan;
  int threads = 1;     // per rank
  bool check = false;  // poison the destination, then compare every value
  bool digest = false;
  std::string dump;           // a new directory for the shards of each rank; empty: no dump
  uint64_t budget_bytes = 0;  // per node, for `modicum watch`; 0: none
};
// If the run has an optimizer, its state is allocated but takes no step. On failure the directory
// `dump` is removed. Errors as those of run_ranks.
LoadReport load_in_ranks(const LoadTask& task, ShowBytes show);

}  // namespace modicum
