// The test double of the board seam: ranks that are threads of one process, failures to order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "modicum/ranks/board.h"

namespace modicum {

// Where a peer is to fail, counted from 1 over all ranks; 0 never.
struct BoardScript {
  int64_t fail_at_check = 0;  // the n-th time that somebody asks whether a rank has failed
  int64_t fail_at_beat = 0;   // with the n-th beat; seen by who looks next
  int culprit_rank = 7;       // and who it is that fails
};

// Keeps a record of the beats. Any thread; barriers wait without a time limit, for ranks that are
// threads.
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

  int64_t checks() const;
  std::vector<Beat> beats() const;
  uint64_t bytes_of_rank(int rank) const;  // sum over its beats

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
