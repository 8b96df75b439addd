#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>

#include "modicum/cli/cli.h"
#include "modicum/cli/verbs.h"

namespace modicum {
namespace {

int print_help(const Surroundings& at) {
  std::string text = "modicum: model state of sharded training in a modicum of memory\n\n";
  for (const Verb& verb : verbs()) text += fmt::format("{:<9}{}\n", verb.name, verb.help);
  text += "\nmodicum VERB --help lists the flags of a verb; --help-all lists rare ones, too.\n";
  at.print(text);
  return 0;
}

int run_verb(const std::string& name, const Args& args, const Surroundings& at) {
  if (name == "--help" || name == "-h" || name == "help") return print_help(at);
  if (name == "--version") {
    at.print("modicum " MODICUM_VERSION "\n");
    return 0;
  }
  return row_named("verb", name, verbs()).run(args, at);
}

int explain(const Error& error, bool json, const Surroundings& at) {
  if (json) {
    try {
      at.print(error_json(error) + "\n");
    } catch (const Error&) {
      // stdout can't be written; `error` may be that failure. stderr and the exit code report it.
    }
  }
  at.print_error(fmt::format("modicum: {}\n", error.what()));
  return exit_code(error.category());
}

}  // namespace

bool has_json(std::span<const std::string> arguments) {
  // Arguments after `--` are for another program.
  const auto own_end = std::find(arguments.begin(), arguments.end(), "--");
  return std::find(arguments.begin(), own_end, "--json") != own_end;
}

int run_command_line(std::span<const std::string> arguments, const Surroundings& at) {
  const bool json = has_json(arguments);
  try {
    if (arguments.empty()) fail(Category::usage, "no verb given; see modicum --help");
    return run_verb(arguments[0], {arguments.begin() + 1, arguments.end()}, at);
  } catch (const Error& error) {
    return explain(error, json, at);
  } catch (const std::bad_alloc&) {
    return explain(Error(Category::no_memory, "out of memory"), json, at);
  } catch (const std::exception& error) {
    return explain(Error(Category::internal, error.what()), json, at);
  }
}

}  // namespace modicum
