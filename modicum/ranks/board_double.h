// The test double of Board: ranks are threads of one process, failures are scripted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "modicum/ranks/board.h"

namespace modicum {

// The call at which a rank fails. Calls of all ranks are counted together, from 1; 0: never.
struct BoardScript {
  int64_t fail_at_check = 0;  // number of the call of `failure()`; each `check` makes one
  int64_t fail_at_beat = 0;   // number of the heartbeat; the next `check` throws
  int culprit_rank = 7;       // the rank that fails
};

// Records the heartbeats. Threads: any. A barrier waits without a time limit.
class ScriptedBoard final : public Board {
 public:
  struct Beat {
    int rank = 0;
    uint64_t more_bytes = 0;
  };

  explicit ScriptedBoard(int ranks, BoardScript script = {});
  void beat(int rank, uint64_t more_bytes) noexcept override;
  bool report(const ErrorRecord& failure) noexcept override;
  std::optional<ErrorRecord> failure() const override;
  void barrier(int rank) override;
  void agree(int rank, const Digest& digest) override;

  int64_t checks() const;  // calls of `failure`
  std::vector<Beat> beats() const;
  uint64_t bytes_of_rank(int rank) const;  // sum over its heartbeats

 private:
  ErrorRecord scripted() const;

  const BoardScript script_;
  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  mutable std::optional<ErrorRecord> failure_;
  mutable int64_t checks_ = 0;
  std::vector<Beat> beats_;
  std::vector<uint32_t> rounds_;  // barriers reached, by rank
  std::vector<Digest> digests_;
};

}  // namespace modicum
