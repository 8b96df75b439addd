// Starts a watched command. Internal to `watch`.
#pragma once

#include <string>

#include "modicum/base/base.h"
#include "modicum/watch/command.h"

namespace modicum {

struct Start {
  const WatchTask& task;
  std::string entry;    // MemoryCage::entry of the command's memory cgroup; empty: none
  std::string reports;  // the path of the table in which processes report about themselves
};

// Starts the command in a new process, after `restore` has run there. Returns its pid after its
// exec has succeeded. Otherwise throws IO with what has failed, the path included, and why; NOMEM
// if fork(2) fails.
int start_command(const Start& start, FunctionRef<void()> restore);

}  // namespace modicum
