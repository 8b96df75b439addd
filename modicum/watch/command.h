// Runs a command and watches its process tree. Part of the door of `watch`.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/io.h"
#include "modicum/watch/record.h"

namespace modicum {

struct WatchTask {
  std::vector<std::string> command;  // looked up in PATH
  bool is_stdout_for_us = false;     // then the command writes to stderr instead
  std::optional<uint64_t> limit_bytes;
  // Called in the command's process before it starts: restores what this process has changed of its
  // signals.
  std::function<void()> restore_signals = [] {};
};

// Runs the command to its end and samples its descendants, also those whose parents have ended.
// SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded to the command, unless a
// terminal sends them, which reaches the command too. Their mask is as before afterwards.
//
// IO if the command can't be started, or the cgroup for a limit can't be made; NOMEM if no process
// can be forked. Threads: this process must have no other.
WatchRecord watch_command(const WatchTask& task, FileSystem& files);

}  // namespace modicum
