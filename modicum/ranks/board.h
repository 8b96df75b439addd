// The interface between ranks for everything but tensor bytes: heartbeats, failures, barriers,
// agreement.
//
//   rank 0      beat  beat  barrier, polls ..................  PEER "rank 1 failed: ..."
//   rank 1      beat  beat  Error -- report --+
//                                             v
//   board       slots: progress, heartbeat    failure: the first report wins
//                                             ^
//   launcher    supervisor -- report ---------+   for a rank that died, is stopped or has stalled
//
// Every other rank throws PEER at its next `check`, or while it waits in a barrier. The launcher
// then ends all ranks and throws the first failure (supervisor.h).
//
// Threads: several threads of a rank may call `beat`, `report`, `failure` and `check`; only one may
// call `barrier` and `agree`. A call that waits for other ranks throws PEER soon after a failure
// has been reported.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"
#include "modicum/spec/spec.h"

namespace modicum {

// An Error as a trivially copyable struct, for shared memory. Long texts are truncated.
struct ErrorRecord {
  Category category = Category::internal;
  // The rank that the error names, or else the one that reported it; nullopt: the launcher.
  std::optional<int> rank;
  int64_t pid = 0;                  // the process that reported it
  std::optional<int> culprit_rank;  // the rank that failed, if it is known
  std::optional<int64_t> culprit_pid;
  std::optional<uint64_t> offset;
  std::optional<uint64_t> shortfall_bytes;
  Footprint owners;  // for BUDGET, else empty
  char what[512] = {};
  char file[256] = {};
  char tensor[256] = {};
  char expected[128] = {};
  char got[128] = {};
};
// `rank` is the reporting rank (nullopt: the launcher). If the error itself names a rank, that one
// is recorded instead.
ErrorRecord record_of(const Error& error, std::optional<int> rank);
Error error_of(const ErrorRecord& record);

class Board {
 public:
  virtual ~Board() = default;

  // How many ranks can use the board, numbered from 0. A load or a save throws USAGE if its plan
  // has more. By default any number.
  virtual int ranks() const noexcept { return std::numeric_limits<int>::max(); }

  // Sends a heartbeat. `more_bytes` is the progress since the previous one; 0 while the rank waits
  // for peers.
  virtual void beat(int rank, uint64_t more_bytes) = 0;
  // Records the first failure and ignores later ones. Returns whether `failure` was recorded.
  virtual bool report(const ErrorRecord& failure) noexcept = 0;
  virtual std::optional<ErrorRecord> failure() const = 0;
  // Waits until every rank has called `barrier` or `agree` as often as this rank has. Throws PEER,
  // which names the culprit, if a rank fails meanwhile.
  virtual void barrier(int rank) = 0;
  // A barrier that also compares digests. If a digest differs from rank 0's, every rank throws
  // CONFLICT, which names the first such rank. Must be called at most once per board.
  virtual void agree(int rank, const Digest& digest) = 0;

  // Throws PEER if a failure has been reported. For loops in which no other call throws it.
  void check() const;
};

// The board of ranks on one machine: a shared mapping of about 1 KiB per rank, which is charged to
// no ledger. The launcher owns it: constructs it before the ranks are forked, for as many ranks as
// the plan has (Plan::ranks()), and keeps it until they have ended. Waits poll every millisecond;
// with 128 ranks or more every `ranks / 64` ms, but at least every 100 ms. All calls throw USAGE
// for a rank outside of [0, ranks()).
class SharedBoard final : public Board {
 public:
  static constexpr size_t kResultBytes = 1024;

  // Throws USAGE unless `ranks` is 1 or more, NOMEM. `clock` must outlive the board.
  SharedBoard(int ranks, Clock& clock);
  void beat(int rank, uint64_t more_bytes) override;
  bool report(const ErrorRecord& failure) noexcept override;
  std::optional<ErrorRecord> failure() const override;
  void barrier(int rank) override;
  void agree(int rank, const Digest& digest) override;

  int ranks() const noexcept override { return ranks_; }
  // For the supervisor.
  uint64_t progress(int rank) const;     // bytes
  int64_t last_beat_ns(int rank) const;  // on the board's clock; 0: no heartbeat yet
  bool is_waiting(int rank) const;       // in a barrier, where it sends no heartbeats
  void set_done(int rank);               // its body has returned
  bool is_done(int rank) const;
  // Stores a rank's result, truncated to kResultBytes. The launcher reads it after the rank ended.
  void post(int rank, std::span<const std::byte> result);
  std::span<const std::byte> posted(int rank) const;
  // `post_value` posts a trivially copyable value; `posted_value` returns it. `rank` must have
  // posted a value of the same type.
  template <typename Outcome>
  Outcome posted_value(int rank) const {
    static_assert(sizeof(Outcome) <= kResultBytes && std::is_trivially_copyable_v<Outcome>);
    Outcome outcome;
    MODICUM_ASSERT(posted(rank).size() == sizeof outcome);
    std::memcpy(&outcome, posted(rank).data(), sizeof outcome);
    return outcome;
  }
  template <typename Outcome>
  void post_value(int rank, const Outcome& outcome) {
    static_assert(sizeof(Outcome) <= kResultBytes && std::is_trivially_copyable_v<Outcome>);
    post(rank, std::as_bytes(std::span(&outcome, 1)));
  }

 private:
  struct Head;
  struct Slot;
  Head& head() const noexcept;
  Slot& slot(int rank) const;
  void wait_for_all(int rank, uint32_t round);

  Mapping mapping_;
  const int ranks_;
  Clock& clock_;
};

}  // namespace modicum
