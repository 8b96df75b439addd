#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>

#include "modicum/cli/output.h"
#include "modicum/cli/verbs.h"

namespace modicum {
namespace {

int print_help() {
  std::string text = "modicum: model state of sharded training in a modicum of memory\n\n";
  for (const Verb& verb : verbs()) text += fmt::format("{:<9}{}\n", verb.name, verb.help);
  text += "\nmodicum VERB --help lists the flags of a verb.\n";
  print(text);
  return 0;
}

int run_verb(const std::string& name, const Args& args) {
  if (name == "--help" || name == "-h" || name == "help") return print_help();
  if (name == "--version") {
    print("modicum " MODICUM_VERSION "\n");
    return 0;
  }
  return row_named("verb", name, verbs()).run(args);
}

// Prints the error as one line on stderr and, with --json, as an object on stdout.
int explain(const Error& error, bool json) {
  if (json) {
    try {
      print(error_json(error) + "\n");
    } catch (const Error&) {
      // stdout can't be written; `error` may be that failure. stderr and the exit code report it.
    }
  }
  print_error(fmt::format("modicum: {}\n", error.what()));
  return exit_code(error.category());
}

int run(const Args& args) {
  // Arguments after `--` are for another program.
  const auto own_end = std::find(args.begin(), args.end(), "--");
  const bool json = std::find(args.begin(), own_end, "--json") != own_end;
  try {
    exit_on_stop_signals(json);
    if (args.empty()) fail(Category::usage, "no verb given; see modicum --help");
    return run_verb(args[0], {args.begin() + 1, args.end()});
  } catch (const Error& error) {
    return explain(error, json);
  } catch (const std::bad_alloc&) {
    return explain(Error(Category::no_memory, "out of memory"), json);
  } catch (const std::exception& error) {
    return explain(Error(Category::internal, error.what()), json);
  }
}

}  // namespace
}  // namespace modicum

int main(int argc, char** argv) {
  modicum::guard_standard_descriptors();
  return modicum::run({argv + 1, argv + argc});
}
