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
  // Fill the shards' memory with a pattern before the load (HostSink::poison), so that check_values
  // finds elements that were never written.
  bool check = false;
};

// Calls `work`. If it throws NOMEM, adds the name of the phase to the error.
template <typename Work>
auto naming_phase(std::string_view phase, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    if (error.category() != Category::no_memory) throw;
    fail(error.category(), fmt::format("in phase {}: {}", phase, error.what_happened()),
         error.facts());
  }
}

// Call load() after the construction, and all other functions after that. Not thread-safe.
class RankLoad {
 public:
  // Agrees with the other ranks on the plan's inputs, then constructs the sink (for `caller_memory`
  // and `copy` see HostSink). Throws CONFLICT if the ranks' plans differ; BUDGET, NOMEM, USAGE.
  explicit RankLoad(const RankLoadTask& task, HostSink::CallerMemory caller_memory = {},
                    HostSink::Copy copy = {});

  // Throws the errors of modicum::load; INTEGRITY if a value of a checkpoint is not the saved one.
  void load();
  // What was read of a checkpoint. Other ranks' parts are yet to be merged.
  ComparedChunks& compared() noexcept { return compared_; }
  // Compares every loaded value in host memory with the checkpoint (Expectation). Throws INTEGRITY.
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
  const uint64_t held_before_;  // what the ledger held before construction
  HostSink shards_;
  ComparedChunks compared_;
  Charge header_, plan_, ring_;
};

}  // namespace modicum
