#include <CLI/CLI.hpp>

#include <optional>
#include <string>

#include "modicum/cli/within_budget.h"

namespace modicum {
namespace {

struct ConvertFlags {
  CommonFlags common;
  // Layout `none`: a single rank has every tensor unsharded. `untie`: a tied tensor that is stored
  // twice is written twice.
  RunFlags run{.layout = "none", .untie = true, .destination = "discard"};
  std::string out;
  std::string shard_size;
  bool sparse = false;
  bool allow_overflow = false;
  bool adopt = false;
};

void add_convert_flags(CLI::App& app, ConvertFlags& flags) {
  app.option_defaults()->group("Values");
  app.add_option("DIR", flags.run.directory,
                 "a directory, a file, or ORG/NAME in the local Hugging Face cache")
      ->required();
  app.add_option("OUT", flags.out, "the new directory")->required();
  app.add_option("--dtype", flags.run.dtype,
                 "cast floating-point tensors, dequantise FP8 codes; default: as stored")
      ->type_name("DTYPE");
  app.add_option("--keep-fp32", flags.run.keep_fp32, "tensors to write as float32")
      ->type_name("REGEX");
  app.add_option("--recipe", flags.run.recipe,
                 "a recipe.json: how tensors are made of stored ones; default: as stored")
      ->type_name("FILE");
  app.add_flag("--allow-overflow", flags.allow_overflow,
               "write infinity for finite values that are too large for their new dtype; default: "
               "they are an error");
  app.option_defaults()->group("Files");
  app.add_option("--shard-size", flags.shard_size,
                 "largest size of a file's data; default: tensors are divided into files as in DIR")
      ->type_name("SIZE");
  app.add_flag("--sparse", flags.sparse,
               "leave a hole in the file, which takes no disk space, for each page of zeros");
  add_common_flags(app, flags.common, {.staging = &flags.run.staging});
  app.option_defaults()->group(kRareFlags);
  add_adopt_flag(app, flags.adopt);
}

}  // namespace

int run_convert(const Args& args, const Surroundings& at) {
  CLI::App app(
      "write a checkpoint with another dtype, recipe or file size, without holding it in memory",
      "modicum convert");
  ConvertFlags flags;
  add_convert_flags(app, flags);
  if (const auto done = parse(app, args, at)) return *done;
  const std::optional<uint64_t> shard_bytes = shard_size_of(flags.shard_size);
  std::optional<ConvertedForm> form;
  const auto prepare = [&](Run& run) {
    form.emplace(run.checkpoint, run.recipe, shard_bytes);
    run.options.save = form->footprint(plan_run(run, *run.options.strategy, std::nullopt));
  };
  const ConvertReport report = within_budget(
      at, flags.common, flags.run,
      [&](const LoadTask& task, ShowBytes show) {
        return convert_in_rank(
            {task, *form, flags.out, flags.sparse, flags.allow_overflow, flags.adopt}, show);
      },
      prepare);
  print_result(
      flags.common, at, [&] { return convert_json(report); }, [&] { return convert_text(report); });
  return 0;
}

}  // namespace modicum
