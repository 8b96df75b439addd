#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "modicum/cli/verbs.h"
#include "modicum/probe/probe.h"
#include "modicum/ranks/ranks.h"

namespace modicum {
namespace {

constexpr auto kVerbs = std::to_array<Verb>({
    {"inspect", "list the tensors, dtypes, files and warnings of a checkpoint", run_inspect},
    {"synth", "write a checkpoint of a model's true shapes with known values", run_synth},
    {"plan", "predict reads, traffic and peak memory of every rank and node", run_plan},
    {"load", "load into rank processes and compare their memory with the plan", run_load},
    {"rehearse", "load and step the optimizer in one budget; show the memory of each phase",
     run_rehearse},
    {"save", "load, then save a step, which is committed completely or not at all", run_save},
    {"resume", "load the newest intact step", run_resume},
    {"verify", "check the files of a checkpoint, and the values of a saved step", run_verify},
    {"convert", "write a checkpoint with another dtype, recipe or file size", run_convert},
    {"diff", "compare two checkpoints, tensor by tensor", run_diff},
    {"step", "step the optimizer on synthetic parameters; show bytes per parameter and speed",
     run_step},
    {"doctor", "find settings of this machine or of a running program that cost memory",
     run_doctor},
    {"watch", "run any command and measure the memory of its process tree", run_watch},
});

}  // namespace

std::span<const Verb> verbs() noexcept { return kVerbs; }

std::string format_names() {
  std::vector<std::string_view> names;
  for (const StateFormatRow& row : state_formats()) names.push_back(row.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

void add_common_flags(CLI::App& app, CommonFlags& flags) {
  app.add_flag("--json", flags.json, "one JSON document on stdout");
  app.add_flag("-q,--quiet", flags.quiet, "print only errors, and with --json the document");
  app.add_flag("-v,--verbose", flags.verbose,
               "inspect: print a line for each tensor; doctor: also show what each `info` "
               "finding advises");
  app.add_option("--threads", flags.threads,
                 "threads of each rank process, or of the one process of synth and diff; "
                 "default: the usable CPUs, divided by the number of ranks; no effect "
                 "on inspect, verify, doctor and watch")
      ->check(CLI::Range(1, 1024));
  app.add_option(
      "--budget", flags.budget,
      "limit on the host memory per node: SIZE, none, or auto (the memory that cgroup and "
      "node have left); default: auto, but none for plan and doctor. Has no effect on "
      "watch, which has --limit");
  app.add_option("--progress", flags.progress,
                 "progress on stderr: auto (default: one line that is rewritten, if stderr is a "
                 "terminal), plain (a new line every 5 s) or none")
      ->check(CLI::IsMember({"auto", "plain", "none"}));
}

void add_adopt_flag(CLI::App& app, bool& adopts) {
  app.add_flag("--adopt", adopts,
               "keep the finished files of a conversion to OUT by another host that can't be asked "
               "whether it goes on; default: refuse until 10 minutes after its last sign of life");
}

void add_run_flags(CLI::App& app, RunFlags& flags) {
  app.add_option("DIR", flags.directory,
                 "a directory, a file, or ORG/NAME in the local Hugging Face cache")
      ->required();
  app.add_option("--ranks", flags.ranks, "number of rank processes; default 1");
  app.add_option("--ranks-per-node", flags.ranks_per_node,
                 "number of ranks on each node; default: all ranks are on one node");
  app.add_option("--strategy", flags.strategy,
                 "which ranks read the files, and what they send to other ranks: "
                 "own-shard (default), node-reader, replica-striped, rank0-broadcast or "
                 "full-per-rank");
  app.add_option(
      "--layout", flags.layout,
      "fsdp2 (default), hsdp, tp-fsdp, zero1, zero2, zero3, or none (replicate everything)");
  app.add_option(
      "--mesh", flags.mesh,
      "sizes of the mesh axes. hsdp: AxB is A replicas of B shards, AxBxC is A replicas of (B x C) "
      "shards. tp-fsdp: AxB is dp A x tp B, AxBxC is dp (A x B) x tp C");
  app.add_option("--shard-dim", flags.shard_dim, "the tensor dim that FSDP shards; default 0");
  app.add_option(
      "--tp-rowwise", flags.tp_rowwise,
      "REGEX of tensors that TP shards along dim 1; if no --tp-* flag matches a tensor, TP "
      "shards it along dim 0");
  app.add_option(
      "--tp-packed", flags.tp_packed,
      "REGEX of tensors that hold two matrices, one after the other along dim 0 (gate and "
      "up); TP shards each of the two along dim 0");
  app.add_option("--tp-replicate", flags.tp_replicate, "REGEX of tensors that TP replicates");
  app.add_option(
      "--expert-mesh", flags.expert_mesh,
      "AxB: expert tensors are sharded along dim 0 among B ranks (EP), then by FSDP among A "
      "ranks");
  app.add_option("--experts", flags.experts,
                 "with --expert-mesh: REGEX of expert tensors; default \\.experts\\.");
  app.add_flag("--round-robin", flags.round_robin,
               "zero1, zero2: order parameters as DeepSpeed does with round_robin_gradients");
  app.add_option("--dtype", flags.dtype,
                 "cast floating-point tensors, and dequantise FP8 codes, to float32, "
                 "bfloat16 or float16 (fp32, bf16, fp16); default: as stored");
  app.add_option("--keep-fp32", flags.keep_fp32, "REGEX of tensors that are loaded as float32");
  app.add_option(
      "--recipe", flags.recipe,
      "a recipe.json, which says how tensors are made of stored ones; default: every tensor "
      "as stored");
  app.add_flag(
      "--untie", flags.untie,
      "load both copies of a tied tensor that is stored under two names; default: load one, "
      "and fail if they differ");
  app.add_option(
      "--optimizer", flags.optimizer,
      fmt::format("none (default; of resume: the saved one), or adamw:FORMAT, to include "
                  "the optimizer's state in this format: {}",
                  format_names()));
  app.add_option("--frozen", flags.frozen,
                 "REGEX of parameters that are not trained, and so have no optimizer state");
  app.add_option(
      "--destination", flags.destination,
      "cpu (default): keep the shards in host memory; discard: drop loaded bytes, as a load "
      "to a device does after the copy");
  app.add_option(
      "--staging", flags.staging,
      "size of the staging buffer that each rank allocates at its start; default 8 MiB, or "
      "less if the budget requires it");
  app.add_option("--baseline", flags.baseline,
                 "memory of a rank process before it uses Modicum; default 2 MiB; with torch it is "
                 "0.3 to 1.5 GiB");
}

namespace {

// An unset shell variable (--budget "$B") must not silently turn off a limit or a check.
void refuse_empty_values(const Args& args) {
  std::string_view flag;  // the previous argument, if it is a flag
  for (const std::string& arg : args) {
    const bool is_flag = arg.size() > 1 && arg[0] == '-';
    if (arg.empty()) {
      fail(Category::usage,
           flag.empty() ? "an argument is empty" : fmt::format("the value of {} is empty", flag),
           {.expected = "a value", .got = "''"});
    }
    if (arg.starts_with("--") && arg.find('=') == arg.size() - 1) {
      fail(Category::usage,
           fmt::format("the value of {} is empty", printable(arg.substr(0, arg.size() - 1))),
           {.expected = "a value", .got = "''"});
    }
    flag = is_flag ? std::string_view(arg) : std::string_view();
  }
}

// Removes leading zeros from a decimal number. Returns an error message if `text` has a character
// that no decimal number has, or is negative and must not be, else "". Without this, CLI11 reads
// 010 as eight and 0x10 as sixteen.
std::string make_decimal(std::string& text, bool is_unsigned) {
  if (is_unsigned && text.starts_with('-')) return "a number below 0";
  const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
  const bool is_decimal = text.find_first_not_of("0123456789.eE+-", sign) == std::string::npos;
  if (!is_decimal) return fmt::format("'{}' is not a decimal number", printable(text));
  const size_t digits = std::min(text.find_first_not_of('0', sign), text.size());
  const bool has_digit = digits < text.size() && text[digits] >= '0' && text[digits] <= '9';
  // Keeps one zero if no digit follows it, as in 0 and 0.5.
  if (digits > sign) text.erase(sign, digits - sign - (has_digit ? 0 : 1));
  return "";
}

void take_decimal_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const bool is_number =
        type.starts_with("INT") || type.starts_with("UINT") || type.starts_with("FLOAT");
    if (is_number && option->get_items_expected_max() > 0) {
      const bool is_unsigned = type.starts_with("UINT");  // CLI11 would wrap -1 around
      option->transform(CLI::Validator(
          [is_unsigned](std::string& text) { return make_decimal(text, is_unsigned); }, ""));
    }
  }
}

// Breaks lines of `help` at 100 columns. The rest of an option's line is indented to the column at
// which CLI11 begins descriptions.
std::string wrapped(const std::string& help) {
  constexpr size_t kColumns = 100;
  constexpr size_t kDescription = 30;
  std::string text;
  for (size_t begin = 0; begin < help.size();) {
    const size_t end = std::min(help.find('\n', begin), help.size());
    std::string line = help.substr(begin, end - begin);
    const size_t indent = line.starts_with("  ") ? kDescription : 0;
    while (line.size() > kColumns) {
      const size_t space = line.rfind(' ', kColumns);
      if (space == std::string::npos || space <= indent) break;
      text += line.substr(0, space) + "\n";
      line = std::string(indent, ' ') + line.substr(space + 1);
    }
    text += line + "\n";
    begin = end + 1;
  }
  return text;
}

}  // namespace

std::optional<int> parse(CLI::App& app, const Args& args, const Surroundings& at) {
  refuse_empty_values(args);
  take_decimal_numbers(app);
  app.allow_extras();  // unknown flags are refused below, with the nearest name
  app.set_help_flag("-h,--help", "this list");
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));
  } catch (const CLI::CallForHelp&) {
    at.print(wrapped(app.help()));
    return 0;
  } catch (const CLI::ParseError& error) {
    // An unknown flag is reported first: it may be the reason why a required one is missing.
    if (app.remaining().empty()) fail(Category::usage, error.what());
  }
  if (app.remaining().empty()) return std::nullopt;
  const std::string unknown = app.remaining().front();  // a copy: remaining() returns a temporary
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::string flag = unknown.substr(0, unknown.find('='));
  fail(Category::usage,
       fmt::format("unexpected '{}'{}", printable(unknown), nearest_hint(flag, names)));
}

void add_seed(CLI::App& app, uint64_t& seed, const std::string& seeded) {
  // CLI11's own conversion would read -1 as 2^64 - 1 and accept numbers that overflow.
  const auto parse = [&seed](const std::string& text) {
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, seed);
    if (error == std::errc() && rest == end) return;
    fail(Category::usage, "--seed is not an unsigned 64-bit number",
         {.expected = "0 to 2^64 - 1", .got = printable(text)});
  };
  app.add_option_function<std::string>("--seed", parse, "seed of " + seeded + "; default 0");
}

double positive(const std::string& flag, double value) {
  if (std::isfinite(value) && value > 0) return value;
  fail(Category::usage, fmt::format("{} out of range", flag),
       {.expected = "a finite number above 0", .got = fmt::format("{}", value)});
}

std::optional<Budget> budget_in_force(const CommonFlags& flags, int nodes) {
  return budget_of(flags.budget.empty() ? "auto" : flags.budget, nodes);
}

void add_oversubscribe_flag(CLI::App& app, CommonFlags& flags) {
  app.add_flag("--oversubscribe", flags.oversubscribe,
               fmt::format("allow more than {} ranks per usable core", kMaxRanksPerCore));
}

void require_cores(const CommonFlags& flags, int ranks) {
  const int most = kMaxRanksPerCore * granted_cpus();
  if (flags.oversubscribe || ranks <= most) return;
  fail(Category::usage,
       fmt::format("--ranks {} is over {} ranks per usable core; --oversubscribe allows it", ranks,
                   kMaxRanksPerCore),
       {.expected = fmt::format("at most {} ranks", most), .got = fmt::format("{}", ranks)});
}

void print_result(const CommonFlags& flags, const Surroundings& at, FunctionRef<std::string()> json,
                  FunctionRef<std::string()> text) {
  if (flags.json) {
    at.print(json() + "\n");
  } else if (!flags.quiet) {
    at.print(text());
  }
}

void require_budget(const CommonFlags& flags, Purpose purpose, uint64_t bytes) {
  const auto budget = budget_in_force(flags, 1);
  if (!budget) return;
  Footprint footprint;
  footprint[purpose] = bytes;
  require_fits(make_promise({{"hold", {footprint}}}, 0), *budget);
}

}  // namespace modicum
