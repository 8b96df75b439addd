// The output of the process: answers on stdout, errors and progress on stderr. Internal to `cli`.
#pragma once

#include <string_view>

namespace modicum {

// Must be called before any file is opened. If descriptor 0, 1 or 2 is closed, opens it in a way
// that permits neither reads nor writes: otherwise a file opened later could become stdout. Also
// ignores SIGPIPE and SIGXFSZ, so that a failing write returns an error.
void guard_standard_descriptors() noexcept;

// Restores the signal actions that guard_standard_descriptors found; to be called before an exec.
// Async-signal-safe, so a forked child may call it.
void restore_signal_actions() noexcept;

// From now on SIGINT and SIGTERM end the process immediately, with exit code 130 or 21 and an error
// on stderr (with `json` also on stdout). A StopSignals object, for code with files to clean up,
// replaces these handlers while it exists.
void exit_on_stop_signals(bool json);

// Writes all of `text` to stdout. Throws IO if that fails. Afterwards SIGINT and SIGTERM are
// ignored, since the result is final.
void print(std::string_view text);

// Writes to stderr. Drops the rest, without an error, if stderr takes no byte for `wait_ms`.
void print_error(std::string_view text, int wait_ms) noexcept;

}  // namespace modicum
