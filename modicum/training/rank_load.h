// The load of one rank, shared by the command line and Python. Part of the door of `training`.
#pragma once

#include <cstdint>

#include "modicum/report/report.h"
#include "modicum/stream/stream.h"

namespace modicum {

// The inputs of a rank's load. All references must outlive the RankLoad.
struct RankLoadTask {
  const Checkpoint& checkpoint;
  const Plan& plan;
  RankContext at;
  Clock& clock;
  LoadOptions options;
  bool check = false;  // poison the destination first, so that `check_values` finds gaps
};

// Construct, then call load(), then any of the others. One thread.
class RankLoad {
 public:
  // Agrees with the other ranks on the plan's inputs, then constructs the sink (`given` and `copy`
  // as HostSink). CONFLICT if the ranks' plans differ; BUDGET, NOMEM, USAGE.
  explicit RankLoad(const RankLoadTask& task, HostSink::Given given = {}, HostSink::Copy copy = {});

  // Errors as those of modicum::load.
  void load();
  // Compares every loaded value in host memory with the checkpoint (check_values). INTEGRITY.
  void check_values();
  // Charges the ledger for the memory that outlives the load besides shards: manifest, plan, and
  // this rank's part of the ring.
  void book_what_stays();
  // Stores the peaks since construction in the outcome: the ledger's and the kernel's.
  void note_peaks();
  // A heartbeat. PEER if another rank failed.
  void beat() const;

  HostSink& shards() noexcept { return shards_; }
  RankOutcome& outcome() noexcept { return outcome_; }

 private:
  const RankLoadTask task_;
  ReportedPhase phase_;  // until the end of load()
  RankOutcome outcome_;
  const uint64_t held_before_;
  HostSink shards_;
  Charge header_, plan_, ring_;
};

}  // namespace modicum
