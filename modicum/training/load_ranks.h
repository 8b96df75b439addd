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
  int threads = 1;  // per rank
  // Compare every loaded value with the checkpoint (Expectation). Before the load the shards'
  // memory is filled with a pattern, so that elements that were never written are found.
  bool check = false;
  bool digest = false;
  std::string dump;           // a directory to create, with a file of shards per rank; empty: none
  uint64_t budget_bytes = 0;  // per node, for `modicum watch`; 0: none
  RankRunner run_ranks = modicum::run_ranks;
};
// If the run has an optimizer, also allocates its state, but makes no step. On failure removes the
// directory `dump` that it has created. Throws the errors of run_ranks; INTEGRITY if a value of a
// checkpoint is not the saved one.
LoadReport load_in_ranks(const LoadTask& task, ShowBytes show);

}  // namespace modicum
