#include <CLI/CLI.hpp>

#include <optional>
#include <string>

#include "modicum/cli/within_budget.h"

namespace modicum {
namespace {

struct ReshardFlags {
  CommonFlags common;
  // Layout `none`: a single rank has every stored tensor unsharded.
  RunFlags run{.layout = "none", .untie = true, .destination = "discard"};
  std::string out;
  std::string format;
  std::string shard_size;
  bool adopt = false;
};

void add_reshard_flags(CLI::App& app, ReshardFlags& flags) {
  add_common_flags(app, flags.common);
  app.add_option("STEP", flags.run.directory, "a saved step, such as ROOT/step-100")->required();
  app.add_option("OUT", flags.out, "the new step, such as NEW/step-100")->required();
  app.add_option("--state-format", flags.format,
                 "new format of the optimizer's state: " + format_names() + "; default: as saved");
  app.add_option("--shard-size", flags.shard_size,
                 "largest size of a file; default: tensors are divided into files as in STEP");
  app.add_option("--staging", flags.run.staging,
                 "size of the staging buffer; default 8 MiB, or less if the budget requires it");
  add_adopt_flag(app, flags.adopt);
}

}  // namespace

int run_reshard(const Args& args, const Surroundings& at) {
  CLI::App app("copy a step into files of another size, or with another optimizer state format",
               "modicum reshard");
  ReshardFlags flags;
  add_reshard_flags(app, flags);
  if (const auto done = parse(app, args, at)) return *done;
  ReshardOptions options{.staging = flags.run.staging};
  if (!flags.shard_size.empty()) options.shard_bytes = parse_size(flags.shard_size);
  if (!flags.format.empty()) options.format = state_format_named(flags.format).format;
  const RecordedStep step(open_step(at.files, flags.run.directory));
  std::optional<ReshardForm> form;
  const auto prepare = [&](Run& run) {
    form.emplace(step, run, options);
    run.options.save = form->footprint(plan_run(run, *run.options.strategy, std::nullopt));
  };
  const ConvertReport report = within_budget(
      at, flags.common, flags.run,
      [&](const LoadTask& task, ShowBytes show) {
        return reshard_in_rank({task, step, *form, flags.out, flags.adopt}, show);
      },
      prepare);
  print_result(
      flags.common, at, [&] { return convert_json(report); }, [&] { return convert_text(report); });
  return 0;
}

}  // namespace modicum
