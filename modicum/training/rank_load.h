// A rank's load, the same under every front. Part of the door of `training`.
#pragma once

#include <cstdint>

#include "modicum/report/report.h"
#include "modicum/stream/stream.h"

namespace modicum {

// What a rank loads. All that it refers to must outlive the RankLoad.
struct RankLoadTask {
  const Checkpoint& checkpoint;
  const Plan& plan;
  RankContext at;
  Clock& clock;
  LoadOptions options;
  bool check = false;  // poison the destination before, so that `check_values` misses nothing
};

// In this order: made, load, what is wanted of the rest. One thread.
class RankLoad {
 public:
  // Agrees with the other ranks on the plan's inputs, then makes the sink. `given` and `copy` as
  // HostSink has them. CONFLICT where the ranks' plans differ; BUDGET, NOMEM, USAGE.
  explicit RankLoad(const RankLoadTask& task, HostSink::Given given = {}, HostSink::Copy copy = {});

  // Errors as modicum::load's.
  void load();
  // Compares every value in host memory with the checkpoint's own. INTEGRITY.
  void check_values();
  // Books what stays besides the shards when a load has ended: manifest, plan, the exchange ring.
  void book_what_stays();
  // The most that this rank has held since it was made, by the ledger and by the kernel.
  void note_peaks();
  // A heartbeat; PEER where another rank has failed.
  void beat() const;

  HostSink& shards() noexcept { return shards_; }
  RankOutcome& outcome() noexcept { return outcome_; }

 private:
  const RankLoadTask task_;
  RankOutcome outcome_;
  const uint64_t held_before_;
  HostSink shards_;
  Charge header_, plan_, ring_;
};

}  // namespace modicum
