// Whether a save may finish after SIGTERM. Internal to `training`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/ranks/ranks.h"

namespace modicum {

// Estimates the rest of a save from the rate at which all ranks together have written so far. The
// launcher decides once, for all ranks: if the rest fits, they may use all of the grace.
//
//   first write                 SIGTERM                              durable        end of grace
//   |---- bytes, seconds: rate -|---- rest / rate + a quarter, 1 s --|               |
//                               |------------------- grace --------------------------|
//
// Construct before the fork, by the launcher. A rank calls begin(), the launcher the others.
class SaveGrace {
 public:
  // `bytes`: progress of all ranks on the board from begin() to the end of the save.
  SaveGrace(int64_t grace_ns, uint64_t bytes, const SharedBoard& board, Clock& clock);

  // Just before the rank's first write.
  void begin(int rank) const noexcept;

  // The first call, after SIGTERM, decides: all of the grace, or 0 if the rest does not fit. It
  // does not fit as long as a rank has not begun or no byte is written: then there is no rate.
  int64_t granted_ns();
  // Whether the granted time has passed. Decides as granted_ns.
  bool is_over();

 private:
  struct Begin;
  Begin& begin_of(int rank) const noexcept;
  std::optional<int64_t> rest_ns() const;

  const int64_t grace_ns_;
  const uint64_t bytes_;
  const SharedBoard& board_;
  Clock& clock_;
  Mapping begins_;
  std::optional<int64_t> granted_ns_;
  int64_t granted_at_ns_ = 0;
};

}  // namespace modicum
