#include <unistd.h>

#include <string>
#include <vector>

#include "modicum/cli/cli.h"
#include "modicum/cli/output.h"

int main(int argc, char** argv) {
  modicum::guard_standard_descriptors();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  modicum::exit_on_stop_signals(modicum::has_json(arguments));
  modicum::PosixFileSystem files;
  return modicum::run_command_line(arguments, {.files = files,
                                               .print = modicum::print,
                                               .write_error = modicum::print_error,
                                               .is_terminal = isatty(STDERR_FILENO) != 0});
}
