// What leaves the process: answers on stdout, errors and progress on stderr. Internal to `cli`.
#pragma once

#include <string_view>

namespace modicum {

// To be called before any file is opened. Where one of the descriptors 0, 1 and 2 is closed, it
// becomes one that can be neither read nor written: a file opened later must not get its number,
// since what is printed would be written into that file. Also has SIGPIPE and SIGXFSZ ignored, so
// that the write fails instead and its error is reported.
void guard_standard_descriptors() noexcept;

// From now on SIGINT and SIGTERM end the process at once, with their error on stderr (with `json`
// on stdout as well) and its exit code. For work that leaves nothing behind; StopSignals takes
// over while there is something to clean up.
void exit_on_stop_signals(bool json);

// All of `text` to stdout. IO where it can't be written, whatever the reason. Once it is written,
// the run has its result: SIGINT and SIGTERM are ignored.
void print(std::string_view text);

// To stderr; lost where it can't be written within `wait_ms`.
void print_error(std::string_view text, int wait_ms = 1000) noexcept;

}  // namespace modicum
