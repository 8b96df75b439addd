#include "modicum/synth/synth.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "modicum/cli/verbs.h"
#include "modicum/json/json.h"
#include "modicum/probe/probe.h"
#include "modicum/ranks/ranks.h"

namespace modicum {
namespace {

constexpr uint64_t kChunkBytes = 4 * kMiB;  // a thread's buffer, as in synth/write.cc

std::string json_of(const SynthResult& result) {
  JsonWriter json;
  json.begin_object().member("files", result.files).member("tensors", result.tensors);
  json.member("data_bytes", result.data_bytes).member("written_bytes", result.written_bytes);
  return json.end_object().text();
}

std::string text_of(const SynthResult& result, const std::string& out) {
  return fmt::format("{}: {} in {}, {}, {} written\n", out, format_size(result.data_bytes),
                     counted(result.tensors, "tensor"), counted(result.files, "file"),
                     format_size(result.written_bytes));
}

// Writes the checkpoint, or removes the unfinished one on a stop signal.
SynthResult write_unless_stopped(FileSystem& files, const std::string& out, SynthOptions options) {
  const StopSignals stop;
  options.check = [&stop] { stop.check(); };
  try {
    return write_synth(files, out, options);
  } catch (const Error&) {
    stop.check();  // the signal may have caused the failure
    throw;
  }
}

}  // namespace

int run_synth(const Args& args, const Surroundings& at) {
  CLI::App app(
      "write a checkpoint of a model's true shapes; each element is a hash of its FQN and index",
      "modicum synth");
  CommonFlags common;
  SynthOptions options;
  std::string out, dtype, shard_size;
  app.add_option("OUT", out, "the new directory")->required();
  app.add_option("--arch", options.arch,
                 fmt::format("the model: {} (the last two for tests: transformers can't compute "
                             "tiny-moe on CPUs, since its widths are no multiples of 16 bytes)",
                             fmt::join(arch_names(), ", ")))
      ->required()
      ->type_name("NAME");
  app.add_option("--layers", options.layers, "write only the first N layers; default: all")
      ->check(CLI::Range(1, 100000));
  app.add_option("--shard-size", shard_size, "largest size of a file's data; default 5 GB")
      ->type_name("SIZE");
  app.add_option("--dtype", dtype,
                 "of all tensors, without quantisation; default: as the model's checkpoint on the "
                 "Hugging Face Hub")
      ->type_name("DTYPE");
  app.add_flag("--sparse", options.is_sparse,
               "write data to each tensor's first page only, to save disk space");
  add_common_flags(app, common);
  app.option_defaults()->group(kRareFlags);
  app.add_option(
         "--edges", options.edges,
         "with --sparse: comma-separated world sizes; also write data around the boundaries of "
         "their shards")
      ->delimiter(',')
      ->option_text("N,...");
  if (const auto done = parse(app, args, at)) return *done;
  options.dtype = dtype_flag(dtype);
  if (const auto bytes = shard_size_of(shard_size)) options.shard_size_bytes = *bytes;
  options.threads = common.threads > 0 ? common.threads : granted_cpus();
  require_budget(common, Purpose::staging, kChunkBytes * static_cast<uint64_t>(options.threads));
  std::optional<Progress> progress;
  options.show = [&](uint64_t written_bytes, uint64_t total_bytes) {
    if (!progress) progress.emplace(common, total_bytes, at);
    progress->show(written_bytes);
  };
  const SynthResult result = write_unless_stopped(at.files, out, options);
  print_result(
      common, at, [&] { return json_of(result); }, [&] { return text_of(result, out); });
  return 0;
}

}  // namespace modicum
