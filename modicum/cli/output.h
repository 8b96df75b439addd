// The output of the process: answers on stdout, errors and progress on stderr. Internal to `cli`.
#pragma once

#include <string_view>

namespace modicum {

// Call before any file is opened. Occupies those of the descriptors 0, 1 and 2 that are closed with
// ones that can be neither read nor written: otherwise a file opened later could become stdout and
// be printed into. Also ignores SIGPIPE and SIGXFSZ, so that the write fails and is reported.
void guard_standard_descriptors() noexcept;

// From now on SIGINT and SIGTERM end the process immediately, with an error on stderr (with `json`
// on stdout, too) and its exit code. While there is something to clean up, StopSignals takes over.
void exit_on_stop_signals(bool json);

// Writes all of `text` to stdout, else IO. The result is then final, so SIGINT and SIGTERM are
// ignored.
void print(std::string_view text);

// Writes to stderr; gives up silently after `wait_ms`.
void print_error(std::string_view text, int wait_ms = 1000) noexcept;

}  // namespace modicum
