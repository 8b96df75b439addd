// SIGINT and SIGTERM as a flag. Part of the door of `ranks`.
#pragma once

#include <signal.h>

#include <optional>

#include "modicum/base/base.h"

namespace modicum {

// While one lives, SIGINT and SIGTERM end nothing: they are kept to be asked for. Objects may be
// nested; a signal that an outer one has received is received. What handled the signals before does
// so again afterwards. One thread makes and destroys them; any thread may ask.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // What to end with: CANCELLED after SIGINT, PREEMPTED after SIGTERM, nothing before.
  std::optional<Error> received() const;
  // Throws that.
  void check() const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

// The error that this signal means.
Error stop_error(int signal);

}  // namespace modicum
