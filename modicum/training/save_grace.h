// Decides whether a save may finish after SIGTERM. Internal to `training`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/ranks/ranks.h"

namespace modicum {

// Estimates the remaining time of a save from the rate at which all ranks together have written so
// far. The launcher decides once, for all ranks: if the save can probably finish within the grace
// period (SaveTask::grace_ns), the ranks may use all of it.
//
//   first write                 SIGTERM                              durable        end of grace
//   |---- bytes, seconds: rate -|---- rest / rate + a quarter, 1 s --|               |
//                               |------------------- grace --------------------------|
//
// The launcher constructs it before the fork. Ranks call begin(); the launcher calls the other
// functions.
class SaveGrace {
 public:
  // `bytes`: progress that all ranks together add to the board from begin() to the end of the save.
  SaveGrace(int64_t grace_ns, uint64_t bytes, const SharedBoard& board, Clock& clock);

  // Call just before the rank's first write.
  void begin(int rank) const noexcept;

  // Call after SIGTERM. The first call decides. Returns the grace period, or 0 if the remaining
  // time is longer or unknown; it is unknown until all ranks have called begin() and a byte is
  // written.
  int64_t granted_ns();
  // Whether the granted time has passed since the decision. Decides if granted_ns has not been
  // called.
  bool is_over();

 private:
  struct Begin;
  Begin& begin_of(int rank) const noexcept;
  std::optional<int64_t> rest_ns() const;  // remaining time; empty if there is no rate

  const int64_t grace_ns_;
  const uint64_t bytes_;
  const SharedBoard& board_;
  Clock& clock_;
  Mapping begins_;
  std::optional<int64_t> granted_ns_;
  int64_t granted_at_ns_ = 0;
};

}  // namespace modicum
