// The seam between ranks for everything but bytes: who is alive, who failed first, do all agree.
//
// Thread rules: a Board may be used from several threads of a rank at once. None of the calls
// blocks for ever: one that waits ends with an error as soon as any rank has failed.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "modicum/base/base.h"
#include "modicum/memory/memory.h"
#include "modicum/spec/spec.h"

namespace modicum {

// An Error as a fixed struct, so that it crosses between processes (and nothing needs pickling).
// Texts that are too long for it are cut.
struct ErrorRecord {
  Category category = Category::internal;
  std::optional<int> rank;  // who reported it; nothing: no rank, but who watches them
  int64_t pid = 0;
  std::optional<int> culprit_rank;  // whose fault it is, where that is a rank
  std::optional<int64_t> culprit_pid;
  std::optional<uint64_t> offset;
  std::optional<uint64_t> shortfall_bytes;
  Footprint owners;  // over budget, else empty
  char what[512] = {};
  char file[256] = {};
  char tensor[256] = {};
  char expected[128] = {};
  char got[128] = {};
};
ErrorRecord record_of(const Error& error, std::optional<int> rank);
Error error_of(const ErrorRecord& record);

class Board {
 public:
  virtual ~Board() = default;

  // A heartbeat, with progress. A rank that waits for others with good reason beats with 0.
  virtual void beat(int rank, uint64_t more_bytes) noexcept = 0;
  // The first failure wins; true where it is this one.
  virtual bool report(const ErrorRecord& failure) noexcept = 0;
  virtual std::optional<ErrorRecord> failure() const = 0;
  // Waits until every rank has come here as often as this one. PEER (naming the culprit) as soon as
  // one has failed.
  virtual void barrier(int rank) = 0;
  // Every rank posts its digest; CONFLICT, naming who differs from rank 0, where they are not all
  // the same. Once per board.
  virtual void agree(int rank, const Digest& digest) = 0;

  // Throws PEER where a rank has failed: for loops that would otherwise not notice.
  void check() const;
};

// On one machine: a shared mapping, made before the ranks are forked. Waits poll every millisecond,
// less often where there are more than 64 ranks.
class SharedBoard final : public Board {
 public:
  static constexpr size_t kResultBytes = 1024;

  SharedBoard(int ranks, Clock& clock);
  void beat(int rank, uint64_t more_bytes) noexcept override;
  bool report(const ErrorRecord& failure) noexcept override;
  std::optional<ErrorRecord> failure() const override;
  void barrier(int rank) override;
  void agree(int rank, const Digest& digest) override;

  int ranks() const noexcept { return ranks_; }
  // What the supervisor reads.
  uint64_t progress(int rank) const noexcept;
  int64_t last_beat_ns(int rank) const noexcept;  // by the board's clock; 0 before the first
  bool is_waiting(int rank) const noexcept;       // in a barrier: no heartbeat is expected
  void set_done(int rank) noexcept;
  bool is_done(int rank) const noexcept;
  // A rank's result: up to kResultBytes, read by the launcher after the rank is done.
  void post(int rank, std::span<const std::byte> result) noexcept;
  std::span<const std::byte> posted(int rank) const noexcept;
  // What a rank has posted as its last act, a plain value.
  template <typename Outcome>
  Outcome posted_value(int rank) const {
    static_assert(sizeof(Outcome) <= kResultBytes && std::is_trivially_copyable_v<Outcome>);
    Outcome outcome;
    MODICUM_ASSERT(posted(rank).size() == sizeof outcome);
    std::memcpy(&outcome, posted(rank).data(), sizeof outcome);
    return outcome;
  }
  template <typename Outcome>
  void post_value(int rank, const Outcome& outcome) noexcept {
    static_assert(sizeof(Outcome) <= kResultBytes && std::is_trivially_copyable_v<Outcome>);
    post(rank, std::as_bytes(std::span(&outcome, 1)));
  }

 private:
  struct Head;
  struct Slot;
  Head& head() const noexcept;
  Slot& slot(int rank) const noexcept;
  void wait_for_all(int rank, uint32_t round);

  Mapping mapping_;
  const int ranks_;
  Clock& clock_;
};

}  // namespace modicum
