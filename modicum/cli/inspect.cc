#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "modicum/cli/verbs.h"

namespace modicum {

int run_inspect(const Args& args, const Surroundings& at) {
  CLI::App app(
      "list the contents of a checkpoint; reads headers, index and config only, of ORG/NAME also "
      "from the hub (the wheel's command)",
      "modicum inspect");
  CommonFlags flags;
  std::string directory;
  app.add_option("DIR", directory,
                 "a directory, a file, or ORG/NAME in the local Hugging Face cache")
      ->required();
  add_common_flags(
      app, flags, {.threads = false, .progress = false, .verbose = "print a line for each tensor"});
  if (const auto done = parse(app, args, at)) return *done;
  const Checkpoint checkpoint =
      open_checkpoint(at.files, directory, Record::ignored, Content::headers);
  require_budget(flags, Purpose::header, checkpoint.manifest.held_bytes());
  print_result(
      flags, at, [&] { return inspect_json(checkpoint); },
      [&] { return inspect_text(checkpoint, flags.verbose); });
  return 0;
}

}  // namespace modicum
