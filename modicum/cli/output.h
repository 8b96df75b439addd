// The output of the process: answers on stdout, errors and progress on stderr. Internal to `cli`.
#pragma once

#include <string_view>

namespace modicum {

// Call before any file is opened. If descriptor 0, 1 or 2 is closed, opens it so that it can be
// neither read nor written; otherwise a file opened later could become stdout. Also ignores SIGPIPE
// and SIGXFSZ, so that a failing write is reported.
void guard_standard_descriptors() noexcept;

// In a forked child: gives the signals back the actions that they had before the two functions
// around this one. Async-signal-safe.
void restore_signal_actions() noexcept;

// From now on SIGINT and SIGTERM end the process immediately, with an error on stderr (with `json`
// on stdout, too) and its exit code. A StopSignals takes over while files must be cleaned up.
void exit_on_stop_signals(bool json);

// Writes all of `text` to stdout, else IO. The result is then final, so SIGINT and SIGTERM are
// ignored.
void print(std::string_view text);

// Writes to stderr. Gives up after `wait_ms` without an error.
void print_error(std::string_view text, int wait_ms = 1000) noexcept;

}  // namespace modicum
