// Turns SIGINT and SIGTERM into a flag that is polled.
#pragma once

#include <signal.h>

#include <optional>

#include "modicum/base/base.h"

namespace modicum {

// While an object exists, SIGINT and SIGTERM only set a flag. Objects may be nested: an inner one
// reports a signal that an outer one has received. The destructor restores the previous handlers. A
// signal that is ignored stays ignored, as of a background command of a script.
// Threads: one constructs and destroys; any may poll.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // CANCELLED after SIGINT, PREEMPTED after SIGTERM (the last signal counts), nullopt before the
  // first signal.
  std::optional<Error> received() const;
  // The number of signals received so far.
  int count() const noexcept;
  // Throws the error of `received`, if any.
  void check() const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

// CANCELLED for SIGINT, PREEMPTED for any other signal.
Error stop_error(int signal);

}  // namespace modicum
