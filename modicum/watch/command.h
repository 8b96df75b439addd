// Runs a command and watches its process tree. Part of the public header of `watch`.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/io.h"
#include "modicum/watch/record.h"

namespace modicum {

struct WatchTask {
  std::vector<std::string> command;     // looked up in PATH
  bool is_stdout_for_us = false;        // true: the command's stdout goes to stderr
  std::optional<uint64_t> limit_bytes;  // of a memory cgroup that is made for the command
  std::string limit_text;               // as the user has written it
  bool ends_with_us = false;            // true: the kernel kills the command if this process ends
  // Called in the forked process before exec. Restores the signal settings that the caller changed.
  std::function<void()> restore_signals = [] {};
};

// Runs the command to its end, and samples it and its descendants. Descendants whose parents have
// ended are included: this process becomes, and stays, a child subreaper (prctl(2)). SIGINT,
// SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded to the command, unless a terminal
// sent them (it signals the command too) or a watched process did, from a thread that ends with the
// call: readings of memory may take seconds. The signal mask is restored at the end.
//
// Throws IO if the command can't be started or the cgroup of its limit can't be made, NOMEM if
// fork(2) fails. This process must have one thread, and no other children: they would be reaped.
WatchRecord watch_command(const WatchTask& task, FileSystem& files);

}  // namespace modicum
