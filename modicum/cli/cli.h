// The public header of `cli`: the command line as a function.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/ranks/ranks.h"

namespace modicum {

// What the command line takes from its process. A test passes its own files, threads as ranks, and
// texts as output. The verbs `watch` and `doctor`, and --report of `load` and `rehearse`, also act
// on this process.
struct Surroundings {
  FileSystem& files;
  RankRunner run_ranks = modicum::run_ranks;
  FunctionRef<void(std::string_view text)> print;  // to stdout; throws IO
  // To stderr. Drops the rest, without an error, if stderr takes no byte for `wait_ms`.
  FunctionRef<void(std::string_view text, int wait_ms)> write_error;
  bool is_terminal = false;  // stderr

  void print_error(std::string_view text, int wait_ms = 1000) const { write_error(text, wait_ms); }
};

// Whether the command line asks for JSON.
bool has_json(std::span<const std::string> arguments);

// Runs the command `modicum ARGUMENTS...` and returns its exit code. Errors are printed, as one
// line on stderr and, with --json, as an object on stdout.
int run_command_line(std::span<const std::string> arguments, const Surroundings& at);

}  // namespace modicum
