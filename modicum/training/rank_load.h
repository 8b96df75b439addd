// The load of one rank, shared by the command line and Python. Part of the public header of
// `training`.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

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

// Calls `act`. Adds the phase to an error NOMEM.
template <typename Act>
auto naming_phase(std::string_view phase, const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    if (error.category() != Category::no_memory) throw;
    fail(error.category(), fmt::format("in phase {}: {}", phase, error.what_happened()),
         error.facts());
  }
}

// Construct, then call load(), then any other function. Not thread-safe.
class RankLoad {
 public:
  // Agrees with the other ranks on the plan's inputs, then constructs the sink (for `given` and
  // `copy` see HostSink). Throws CONFLICT if the ranks' plans differ; BUDGET, NOMEM, USAGE.
  explicit RankLoad(const RankLoadTask& task, HostSink::Given given = {}, HostSink::Copy copy = {});

  // Throws the errors of modicum::load.
  void load();
  // Compares every loaded value in host memory with the checkpoint. Throws INTEGRITY.
  void check_values();
  // Charges the ledger for the memory other than shards that outlives the load: manifest, plan, and
  // this rank's part of the ring.
  void book_what_stays();
  // Stores the ledger's peak since construction, and the kernel's since the process last called
  // reset_peak_rss, in the outcome.
  void note_peaks();
  // A heartbeat. Throws PEER if another rank failed.
  void beat() const;

  HostSink& shards() noexcept { return shards_; }
  RankOutcome& outcome() noexcept { return outcome_; }

 private:
  const RankLoadTask task_;
  ReportedPhase phase_;  // "load", which ends with load()
  RankOutcome outcome_;
  const uint64_t held_before_;  // by the ledger, before construction
  HostSink shards_;
  Charge header_, plan_, ring_;
};

}  // namespace modicum
