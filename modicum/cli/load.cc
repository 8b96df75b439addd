#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "modicum/cli/watch_instead.h"
#include "modicum/cli/within_budget.h"

namespace modicum {
namespace {

struct LoadFlags {
  CommonFlags common;
  RunFlags run;
  std::string check;
  bool digest = false;
  std::string expect_digest;  // in the format of --digest; empty: no check
  std::string dump;
  std::string report;
};

bool is_digest(const std::string& text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
}

void refuse_contradictions(const LoadFlags& flags) {
  if (!flags.check.empty() && flags.check != "values") {
    fail(Category::usage, fmt::format("unknown check '{}'", printable(flags.check)),
         {.expected = "values"});
  }
  const std::string& digest = flags.expect_digest;
  if (!digest.empty() && !is_digest(digest)) {
    fail(Category::usage, "--expect-digest is not a digest",
         {.expected = "16 hex digits", .got = printable(digest)});
  }
  if (flags.run.destination == "discard" && !flags.dump.empty()) {
    fail(Category::usage, "--dump needs the loaded shards, which --destination discard drops");
  }
}

void require_digest(const LoadFlags& flags, const LoadReport& report) {
  if (flags.expect_digest.empty()) return;
  const std::string found = digest_text(report.digest.value());
  std::string expected = flags.expect_digest;
  std::transform(expected.begin(), expected.end(), expected.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (found == expected) return;
  fail(Category::integrity, "the digest of the loaded model is not the expected one",
       {.expected = flags.expect_digest, .got = found});
}

}  // namespace

int run_load(const Args& args, const Surroundings& at) {
  CLI::App app("load into rank processes; prints predicted and measured memory side by side",
               "modicum load");
  LoadFlags flags;
  add_run_flags(app, flags.run);
  add_common_flags(app, flags.common, {.staging = &flags.run.staging});
  app.add_option("--report", flags.report, std::string(kReportHelp))->type_name("FILE");
  add_rare_run_flags(app, flags.run, flags.common);
  app.add_option("--check", flags.check,
                 "values: fill the destination with the byte 0xa5 before the load, so "
                 "that a value that is not written differs; after it, read the "
                 "checkpoint again and compare every value (values of synth are "
                 "computed instead)")
      ->type_name("values");
  app.add_flag("--digest", flags.digest,
               "print a hash of the names, dtypes, shapes and values of the loaded tensors");
  app.add_option("--expect-digest", flags.expect_digest,
                 "16 hex digits: exit with 12 if the digest is another one")
      ->type_name("HEX");
  app.add_option("--dump", flags.dump, "a new directory, into which each rank writes its shards")
      ->type_name("DIR");
  if (const auto done = parse(app, args, at)) return *done;
  refuse_contradictions(flags);
  if (!flags.report.empty()) watch_instead("load", args, flags.report, at.files);
  flags.digest = flags.digest || !flags.expect_digest.empty();
  const LoadReport report =
      within_budget(at, flags.common, flags.run, [&flags](LoadTask task, ShowBytes show) {
        task.check = !flags.check.empty();
        task.digest = flags.digest;
        task.dump = flags.dump;
        return load_in_ranks(task, show);
      });
  require_digest(flags, report);
  print_result(
      flags.common, at, [&] { return load_json(report); }, [&] { return load_text(report); });
  return 0;
}

}  // namespace modicum
