#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <mutex>

#include "modicum/cli/verbs.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

DiffReport::Difference reported(const Difference& difference) {
  DiffReport::Difference to{.tensor = difference.tensor,
                            .kind = kind_name(difference.kind),
                            .first_index = difference.first_index,
                            .count = difference.count,
                            .largest = difference.largest,
                            .largest_index = difference.largest_index,
                            .shape = difference.shape};
  if (difference.kind != Difference::Kind::dtype) return to;
  to.dtype_a = torch_name(difference.dtype_a);
  to.dtype_b = torch_name(difference.dtype_b);
  if (difference.rounded_to) to.rounded_to = torch_name(*difference.rounded_to);
  to.overflowed = difference.overflowed;
  return to;
}

std::vector<std::string> warnings_of(const Checkpoint& a, const Checkpoint& b) {
  std::vector<std::string> warnings;
  for (const std::string& warning : a.warnings) warnings.push_back("A: " + warning);
  for (const std::string& warning : b.warnings) warnings.push_back("B: " + warning);
  return warnings;
}

}  // namespace

int run_diff(const Args& args, const Surroundings& at) {
  CLI::App app(
      "compare names, dtypes, shapes and values of two checkpoints; exits with 12 if they differ",
      "modicum diff");
  CommonFlags flags;
  std::string path_a, path_b;
  app.add_option("A", path_a,
                 "a checkpoint: a directory, a file, or ORG/NAME in the local Hugging Face cache")
      ->required();
  app.add_option("B", path_b, "a checkpoint, like A")->required();
  add_common_flags(app, flags);
  if (const auto done = parse(app, args, at)) return *done;
  const Checkpoint a = open_checkpoint(at.files, path_a);
  const Checkpoint b = open_checkpoint(at.files, path_b);
  const int threads = threads_per_rank(flags.threads, 1);
  require_budget(flags, Purpose::staging, kDiffBytes * static_cast<uint64_t>(threads));
  Progress progress(flags, a.manifest.data_bytes(), at);
  uint64_t done = 0;
  std::mutex mutex;
  const Differences found = diff(a, b, threads, [&](uint64_t more) {
    const std::lock_guard lock(mutex);
    progress.show(done += more);
  });
  DiffReport report{.tensors = found.tensors,
                    .bytes = found.bytes,
                    .with_record = found.with_record,
                    .warnings = warnings_of(a, b)};
  for (const Difference& difference : found.found) {
    report.differences.push_back(reported(difference));
  }
  print_result(
      flags, at, [&] { return diff_json(report); }, [&] { return diff_text(report); });
  if (report.differences.empty()) return 0;
  const DiffReport::Difference& first = report.differences.front();
  const bool is_only_dtypes = report.equal_after_rounding() == report.differences.size();
  at.print_error(
      fmt::format("modicum: INTEGRITY: the checkpoints differ in {}, first in '{}' ({}){}\n",
                  counted(report.differences.size(), "tensor"), printable(first.tensor), first.kind,
                  is_only_dtypes ? "; " + report.rounding_text() : ""));
  return exit_code(Category::integrity);
}

}  // namespace modicum
