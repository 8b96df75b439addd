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
    {"save", "load, then save a checkpoint, which is committed completely or not at all", run_save},
    {"resume", "load the newest intact checkpoint of a run", run_resume},
    {"verify", "check the files of a checkpoint, and the values of one that Modicum saved",
     run_verify},
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

void add_common_flags(CLI::App& app, CommonFlags& flags, const ActingFlags& acting) {
  app.option_defaults()->group("Host memory and threads");
  if (!acting.budget_default.empty()) {
    app.add_option("--budget", flags.budget,
                   fmt::format("limit per node; auto: what cgroup and memory leave; default {}",
                               acting.budget_default))
        ->type_name("SIZE|auto|none");
  }
  if (acting.staging != nullptr) {
    app.add_option("--staging", *acting.staging,
                   "staging buffer of each rank; default 8 MiB, or less to fit the budget")
        ->type_name("SIZE");
  }
  if (acting.threads) {
    app.add_option("--threads", flags.threads,
                   "of each process; default: the usable CPUs, divided by the ranks")
        ->check(CLI::Range(1, 1024));
  }
  app.option_defaults()->group("Output");
  app.add_flag("--json", flags.json, "one JSON document on stdout");
  app.add_flag("-q,--quiet", flags.quiet, "print only errors, and with --json the document");
  if (acting.progress) {
    app.add_option("--progress", flags.progress,
                   "on stderr; auto (default): one line on a terminal; plain: every 5 s")
        ->check(CLI::IsMember({"auto", "plain", "none"}))
        ->type_name("auto|plain|none");
  }
  const bool is_verbose = !acting.verbose.empty();
  app.add_flag("-v,--verbose", flags.verbose,
               is_verbose ? std::string(acting.verbose) : "no effect; inspect and doctor have one")
      ->group(is_verbose ? "Output" : kRareFlags);
}

void add_adopt_flag(CLI::App& app, bool& adopts) {
  app.add_flag("--adopt", adopts,
               "keep the finished files of a conversion to OUT by another host that can't be asked "
               "whether it goes on; default: refuse until 10 minutes after its last sign of life");
}

void add_run_flags(CLI::App& app, RunFlags& flags) {
  app.option_defaults()->group("Checkpoint");
  app.add_option("DIR", flags.directory,
                 "a directory, a file, or ORG/NAME in the local Hugging Face cache")
      ->required();
  app.add_option("--dtype", flags.dtype,
                 "cast floating-point tensors, dequantise FP8 codes; default: as stored")
      ->type_name("DTYPE");
  app.add_option("--keep-fp32", flags.keep_fp32, "tensors to load as float32")->type_name("REGEX");
  app.add_option("--recipe", flags.recipe,
                 "a recipe.json: how tensors are made of stored ones; default: as stored")
      ->type_name("FILE");
  app.option_defaults()->group("Ranks and layout");
  app.add_option("--ranks", flags.ranks, "number of rank processes; default 1");
  app.add_option("--ranks-per-node", flags.ranks_per_node,
                 "number of ranks on each node; default: all");
  app.add_option("--strategy", flags.strategy,
                 "which ranks read, and what they send: own-shard (default), node-reader, "
                 "replica-striped, rank0-broadcast or full-per-rank")
      ->type_name("NAME");
  app.add_option("--layout", flags.layout,
                 "fsdp2 (default), hsdp, tp-fsdp, zero1, zero2, zero3 or none (replicas)")
      ->type_name("NAME");
  app.add_option("--mesh", flags.mesh,
                 "hsdp: A replicas of B (x C) shards; tp-fsdp: dp A (x B), tp the last")
      ->type_name("AxB[xC]");
  app.add_option("--tp-rowwise", flags.tp_rowwise,
                 "tensors that TP shards along dim 1; the default is dim 0")
      ->type_name("REGEX");
  app.add_option("--tp-packed", flags.tp_packed,
                 "two matrices along dim 0 (gate and up), of which TP shards each")
      ->type_name("REGEX");
  app.add_option("--tp-replicate", flags.tp_replicate, "tensors that TP replicates")
      ->type_name("REGEX");
  app.add_option("--expert-mesh", flags.expert_mesh,
                 "shard experts along dim 0 among B ranks (EP), then by FSDP among A")
      ->type_name("AxB");
  app.option_defaults()->group("Optimizer");
  app.add_option("--optimizer", flags.optimizer,
                 "none (default; of resume: the saved one), or adamw:FORMAT")
      ->type_name("NAME");
  app.add_option("--frozen", flags.frozen, "parameters that are not trained: no optimizer state")
      ->type_name("REGEX");
}

void require_host_memory(const RunFlags& flags, std::string_view verb) {
  if (flags.destination == "cpu") return;
  fail(Category::unsupported, fmt::format("{} needs the loaded tensors in host memory", verb),
       {.expected = "--destination cpu", .got = "--destination discard"});
}

void add_rare_run_flags(CLI::App& app, RunFlags& flags, CommonFlags& common) {
  app.option_defaults()->group(kRareFlags);
  app.add_option("--shard-dim", flags.shard_dim, "the tensor dim that FSDP shards; default 0");
  app.add_option("--experts", flags.experts,
                 "with --expert-mesh: the expert tensors; default \\.experts\\.")
      ->type_name("REGEX");
  app.add_flag("--round-robin", flags.round_robin,
               "zero1, zero2: order parameters as DeepSpeed does with round_robin_gradients");
  app.add_flag("--untie", flags.untie,
               "load both copies of a tied tensor that is stored under two names; default: load "
               "one, and fail if they differ");
  app.add_option("--destination", flags.destination,
                 "cpu (default): keep the shards in host memory; discard (plan, load): drop "
                 "loaded bytes, as a load to a device does after the copy")
      ->type_name("cpu|discard");
  app.add_option("--baseline", flags.baseline,
                 "memory of a rank process before it uses Modicum; default 2 MiB; with torch it is "
                 "0.3 to 1.5 GiB")
      ->type_name("SIZE");
  add_oversubscribe_flag(app, common);
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

// A flag's value in the help: its type without the range, which an error about a value names.
std::string value_text(const CLI::Option& option) {
  if (option.get_positional()) return " ";
  if (option.get_type_size() == 0) return "";  // a switch
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':')) + (option.get_required() ? " (required)" : "");
}

// Defines the words in capitals that `help` contains.
std::string notation(const std::string& help) {
  std::vector<std::string_view> formats;
  for (const StateFormatRow& row : state_formats()) formats.push_back(row.name);
  const std::array<std::pair<std::string_view, std::string>, 4> kinds = {
      {{"SIZE", "bytes, or with a unit: 16G and 16GiB are 16 x 2^30 bytes, 16GB is 16 x 10^9"},
       {"REGEX", "in RE2's syntax, searched for in FQNs; one that matches nothing is an error"},
       {"DTYPE", "float32, bfloat16 or float16 (fp32, bf16, fp16)"},
       {"FORMAT", fmt::format("of the state: {}", fmt::join(formats, ", "))}}};
  std::string text;
  for (const auto& [kind, meaning] : kinds) {
    if (help.find(kind) != std::string::npos) text += fmt::format("{:<8}{}\n", kind, meaning);
  }
  return text.empty() ? "" : "\n" + text;
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

// Help with all flags, or without kRareFlags.
std::string help_text(CLI::App& app, bool all) {
  for (CLI::Option* option : app.get_options()) {
    if (!all && option->get_group() == kRareFlags) option->group("");
    if (option->get_option_text().empty()) option->option_text(value_text(*option));
  }
  std::string text = app.help();
  for (size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
  text.erase(text.find_last_not_of('\n') + 1);
  return wrapped(text + "\n" + notation(text));
}

}  // namespace

std::optional<int> parse(CLI::App& app, const Args& args, const Surroundings& at) {
  refuse_empty_values(args);
  take_decimal_numbers(app);
  app.allow_extras();  // unknown flags are refused below, with the nearest name
  app.set_help_flag("-h,--help", "the flags that most runs need")->group("Output");
  app.set_help_all_flag("--help-all", "every flag")->group("Output");
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));
  } catch (const CLI::CallForHelp&) {
    at.print(help_text(app, false));
    return 0;
  } catch (const CLI::CallForAllHelp&) {
    at.print(help_text(app, true));
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

CLI::Validator integer_from(int64_t least) {
  const std::string range = fmt::format("in range {} to {}", least, INT64_MAX);
  const auto check = [least, range](const std::string& text) -> std::string {
    int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && rest == end && value >= least) return {};
    return fmt::format("Value {} not {}", text, range);
  };
  return CLI::Validator(check, range);
}

std::optional<uint64_t> shard_size_of(const std::string& text) {
  if (text.empty()) return std::nullopt;
  const uint64_t bytes = parse_size(text);
  if (bytes > 0) return bytes;
  fail(Category::usage, "the shard size must not be 0 bytes",
       {.expected = "1 byte or more", .got = printable(text)});
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
