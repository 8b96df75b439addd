#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <utility>

#include "modicum/cli/verbs.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

// The names of the subdirectories of `path` whose name `is_wanted`.
std::vector<std::string> directories_in(FileSystem& files, const std::string& path,
                                        FunctionRef<bool(const std::string& name)> is_wanted) {
  std::vector<std::string> names;
  for (const std::string& name : files.list(path)) {
    if (is_wanted(name) && files.is_directory(join_path(path, name))) names.push_back(name);
  }
  return names;
}

bool is_checkpoint_name(const std::string& name) { return step_of(name).has_value(); }
bool is_in_flight(const std::string& name) { return name.starts_with(".partial-"); }
bool is_set_aside(const std::string& name) { return damaged_step_of(name).has_value(); }

// Whether a save into `path` was not completed.
bool is_unfinished(FileSystem& files, const std::string& path) {
  const std::vector<std::string> names = files.list(path);
  const auto is_sums = [](const std::string& name) { return name.starts_with(kSumsPrefix); };
  return std::any_of(names.begin(), names.end(), is_sums) ||
         !directories_in(files, path, is_in_flight).empty();
}

// `file`: the path from the directory that is verified.
void add_fault(VerifyReport& report, const std::string& file, uint64_t bytes, const Error& error) {
  report.files.push_back({file, bytes, error.what()});
  if (report.fault) return;
  Facts facts = error.facts();
  facts.file = file;
  report.fault.emplace(error.category(), error.what_happened(), std::move(facts));
}

// Verifies one checkpoint. Adds its files to the report, or the error if it can't be
// opened.
// `prefix` is put before the names of files.
void add_run_checkpoint(VerifyReport& report, FileSystem& files, const std::string& path,
                        const std::string& prefix) {
  try {
    const Verification verified = verify_checkpoint(files, path, [] {});
    for (const VerifiedFile& file : verified.files) {
      if (file.fault) {
        add_fault(report, prefix + file.name, file.bytes, *file.fault);
      } else {
        report.files.push_back({prefix + file.name, file.bytes, "ok"});
      }
    }
    report.tensors_checked += verified.tensors_checked;
  } catch (const Error& error) {
    add_fault(report, prefix + error.facts().file, 0, error);
  }
}

// Verifies a checkpoint of ROOT, which a save may remove meanwhile, and its number.
void add_listed(VerifyReport& report, FileSystem& files, const std::string& root,
                const std::string& name) {
  const std::string path = join_path(root, name);
  VerifyReport listed;
  add_run_checkpoint(listed, files, path, name + "/");
  if (!listed.fault) {
    try {
      const int64_t step = open_run_checkpoint(files, path).step;
      if (step != step_of(name)) {
        fail(Category::integrity, "the directory has the record of another checkpoint",
             {.file = "manifest.json", .expected = name, .got = fmt::format("step {}", step)});
      }
    } catch (const Error& error) {
      add_fault(listed, name + "/" + error.facts().file, 0, error);
    }
  }
  if (listed.fault && !files.entry(path)) {
    report.warnings.push_back(fmt::format("{} was removed while it was read", name));
    return;
  }
  report.tensors_checked += listed.tensors_checked;
  report.files.insert(report.files.end(), listed.files.begin(), listed.files.end());
  if (!report.fault && listed.fault) report.fault.emplace(*listed.fault);
}

// Adds a checkpoint that a save has set aside, with its first fault.
void add_damaged(VerifyReport& report, FileSystem& files, const std::string& root,
                 const std::string& name) {
  DamagedCheckpoint damaged{.step = *damaged_step_of(name), .path = join_path(root, name)};
  try {
    damaged.bytes = bytes_below(files, damaged.path);
    const Verification verified = verify_checkpoint(files, damaged.path, [] {});
    if (const Error* const fault = verified.first_fault()) damaged.reason = fault->what();
  } catch (const Error& error) {
    damaged.reason = error.what();
  }
  report.damaged.push_back(std::move(damaged));
}

// Opens the checkpoint, which checks the structure of all its files. In the Hugging Face cache also
// checks the SHA-256 of each data file whose blob is named by its SHA-256.
void add_checkpoint(VerifyReport& report, FileSystem& files, const std::string& path) {
  try {
    const Checkpoint checkpoint = open_checkpoint(files, path, Record::ignored);
    for (const DataFile& file : checkpoint.manifest.files) {
      try {
        const std::string data = join_path(checkpoint.directory, file.name);
        if (const auto sha256 = blob_sha256(files, data)) {
          check_sha256(files, data, *sha256, [] {});
        }
        report.files.push_back({file.name, file.identity.size_bytes, "ok"});
      } catch (const Error& error) {
        add_fault(report, file.name, file.identity.size_bytes, error);
      }
    }
    report.tensors_checked = checkpoint.manifest.tensors.size();
    report.warnings = checkpoint.warnings;
  } catch (const Error& error) {
    add_fault(report, error.facts().file, 0, error);
  }
}

VerifyReport verify(FileSystem& files, const std::string& path) {
  VerifyReport report;
  if (!files.is_directory(path)) {
    add_checkpoint(report, files, path);
  } else if (is_run_checkpoint(files, path)) {
    add_run_checkpoint(report, files, path, "");
  } else if (const auto names = directories_in(files, path, is_checkpoint_name); !names.empty()) {
    for (const std::string& name : names) add_listed(report, files, path, name);
    for (const std::string& name : directories_in(files, path, is_set_aside)) {
      add_damaged(report, files, path, name);
    }
  } else if (is_unfinished(files, path)) {
    add_run_checkpoint(report, files, path, "");  // UNCOMMITTED
  } else {
    add_checkpoint(report, files, path);
  }
  return report;
}

}  // namespace

int run_verify(const Args& args, const Surroundings& at) {
  CLI::App app(
      "check the files and the values of a saved checkpoint, or of all checkpoints of a ROOT; "
      "for any other checkpoint, check the structure of its files and, in "
      "the Hugging Face cache, their SHA-256",
      "modicum verify");
  CommonFlags flags;
  std::string path;
  app.add_option("DIR", path,
                 "a checkpoint (a directory, a file, or ORG/NAME in the local Hugging Face cache), "
                 "or the ROOT of several checkpoints")
      ->required();
  add_common_flags(app, flags, {.threads = false, .progress = false});
  if (const auto done = parse(app, args, at)) return *done;
  require_budget(flags, Purpose::staging, ChunkSums::kChunkBytes);
  const VerifyReport report = verify(at.files, path);
  print_result(
      flags, at, [&] { return verify_json(report); }, [&] { return verify_text(report); });
  if (!report.fault) return 0;
  at.print_error(fmt::format("modicum: {}\n", report.fault->what()));
  return exit_code(report.fault->category());
}

}  // namespace modicum
