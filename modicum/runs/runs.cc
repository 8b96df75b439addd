#include "modicum/runs/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/runs/state_change.h"
#include "modicum/synth/synth.h"

namespace modicum {

int nodes_of(const RunFlags& flags) noexcept {
  return static_cast<int>(ceil_div(flags.ranks, flags.ranks_per_node.value_or(flags.ranks)));
}

int threads_per_rank(int asked, int ranks) {
  return asked > 0 ? asked : std::max(1, granted_cpus() / ranks);
}

std::optional<Budget> budget_of(const std::string& flag, int nodes) {
  if (flag == "none") return std::nullopt;
  if (flag != "auto") return Budget{parse_size(flag), std::string(kFlagSource)};
  const std::vector<MemoryLimit> limits = memory_limits();
  if (limits.empty()) {
    fail(Category::usage, "--budget auto: the kernel reports no memory limit; give a size");
  }
  return Budget{limits.front().available_bytes / static_cast<uint64_t>(nodes),
                limits.front().source, true};
}

std::optional<DType> dtype_flag(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const auto dtype = dtype_from_torch_name(name);
  if (!dtype || !is_castable(*dtype)) {
    fail(Category::usage,
         fmt::format("{} dtype '{}'", dtype ? "no tensor can be cast to" : "unknown",
                     printable(name)),
         {.expected = "float32, bfloat16 or float16 (fp32, bf16, fp16)", .got = printable(name)});
  }
  return dtype;
}

namespace {

std::string text_of(FileSystem& files, const std::string& path, Category too_long) {
  return read_text(*files.open(path), kLongestText, too_long);
}

// Throws `fault`, an error of config.json, as the reason why `what` of `tensor` can't be
// determined.
[[noreturn]] void fail_for(const std::string& tensor, const std::string& what, const Error& fault) {
  Facts facts = fault.facts();
  facts.tensor = tensor;
  fail(fault.category(), fmt::format("can't determine {}: {}", what, fault.what_happened()),
       std::move(facts));
}

void require_known_ties(const Manifest& manifest, bool untie, const Error& fault) {
  for (const NamedTie& tie : word_embedding_ties(manifest, untie)) {
    fail_for(tie.name, fmt::format("whether the tensor is tied to '{}'", printable(tie.target)),
             fault);
  }
}

void require_known_blocks(const Manifest& manifest, const Recipe& recipe, const Error& fault) {
  for (const Target& target : recipe.targets) {
    if (!is_dequantised(recipe, target)) continue;
    for (const uint32_t stored : stored_under(recipe, target.root)) {
      const StoredTensor& codes = manifest.tensors[stored];
      if (!codes.scale || codes.scale->fits()) continue;
      fail_for(codes.spec.fqn, "the block size of FP8 codes", fault);
    }
  }
}

void warn_of_unused(const Recipe& recipe, Checkpoint& checkpoint) {
  if (recipe.unused.empty()) return;
  const std::string& first = checkpoint.manifest.tensors[recipe.unused.front()].spec.fqn;
  checkpoint.warnings.push_back(fmt::format("the recipe leaves {} unused; the first is {}",
                                            counted(recipe.unused.size(), "stored tensor"),
                                            printable(first)));
}

Recipe recipe_of(const RunFlags& flags, const Checkpoint& checkpoint,
                 const std::optional<DType>& dtype, std::optional<std::string> text) {
  const RecipeOptions options{
      .text = std::move(text), .untie = flags.untie, .dtype = dtype, .keep_fp32 = flags.keep_fp32};
  Recipe recipe =
      naming_file(base_name(flags.recipe), [&] { return make_recipe(checkpoint, options); });
  for (const Target& target : recipe.targets) {
    if (!has_op(recipe, target.root, Op::caller)) continue;
    fail(Category::unsupported, "op `caller` takes this tensor from a model in Python",
         {.tensor = target.spec.fqn, .expected = "a stored, init or alias target"});
  }
  return recipe;
}

void require_within(std::string_view what, int value, int least, int most) {
  if (value >= least && value <= most) return;
  fail(Category::usage, fmt::format("{} out of range", what),
       {.expected = fmt::format("{} to {}", least, most), .got = fmt::format("{}", value)});
}

void require_sense(const RunFlags& flags) {
  require_within("ranks", flags.ranks, 1, kMaxRanks);
  require_within("ranks per node", flags.ranks_per_node.value_or(1), 1, kMaxRanks);
  require_within("shard dim", flags.shard_dim, 0, kMaxShardDim);
}

PlanOptions options_of(const RunFlags& flags) {
  const bool keeps = index_named("destination", flags.destination, {"cpu", "discard"}) == 0;
  PlanOptions options{
      .strategy = &strategy_named(flags.strategy),
      .ranks_per_node = flags.ranks_per_node.value_or(0),
      .destination = keeps && !flags.on_device ? Destination::cpu : Destination::copy};
  options.staging_bytes = flags.staging.empty() ? kDefaultStagingBytes : parse_size(flags.staging);
  if (!flags.baseline.empty()) options.baseline_bytes = parse_size(flags.baseline);
  options.threads = threads_per_rank(flags.threads, flags.ranks);
  return options;
}

}  // namespace

Recipe make_recipe(const Checkpoint& checkpoint, RecipeOptions options) {
  const ModelConfig& config = checkpoint.config;
  const Manifest& manifest = checkpoint.manifest;
  if (config.tie_fault && !options.text) {
    require_known_ties(manifest, options.untie, *config.tie_fault);
  }
  options.tie_word_embeddings = config.tie_word_embeddings;
  Recipe recipe = make_recipe(manifest, std::as_const(options));
  if (config.block_size_fault) require_known_blocks(manifest, recipe, *config.block_size_fault);
  return recipe;
}

namespace {

struct ParsedFlags {
  std::optional<DType> dtype;
  PlanOptions options;
  std::optional<StateFormat> optimizer;
  FrozenSet frozen;
};

// Checks the flags in a fixed order; the first invalid one is reported.
ParsedFlags parsed_flags(const RunFlags& flags) {
  require_sense(flags);
  const std::optional<DType> dtype = dtype_flag(flags.dtype);
  asked_layout(flags, {});  // checks the flags of a layout; the targets are not known yet
  PlanOptions options = options_of(flags);
  const std::optional<StateFormat> optimizer = optimizer_flag(flags.optimizer);
  FrozenSet frozen(flags.frozen, flags.without_state);
  if (!optimizer && !flags.frozen.empty()) {
    fail(Category::usage, "--frozen needs --optimizer adamw:FORMAT");
  }
  if (optimizer && options.destination != Destination::cpu && !flags.on_device) {
    fail(Category::unsupported, "--optimizer needs the loaded parameters in host memory",
         {.expected = "--destination cpu, or plan --device", .got = "--destination discard"});
  }
  return {dtype, std::move(options), optimizer, std::move(frozen)};
}

// Warns of the targets that `select` selects, which stay as stored. `text`: the reason.
template <typename Select>
void warn_of_kept(const Recipe& recipe, Checkpoint& checkpoint, const std::string& text,
                  Select select) {
  size_t count = 0;
  const TensorSpec* first = nullptr;
  for (uint32_t t = 0; t < recipe.targets.size(); ++t) {
    const TensorSpec& spec = recipe.targets[t].spec;
    if (recipe.is_alias(t) || !select(spec)) continue;
    if (count++ == 0) first = &spec;
  }
  if (count == 0) return;
  checkpoint.warnings.push_back(fmt::format("kept as stored: {} ({}); the first is {} ({})",
                                            counted(count, "tensor"), text, printable(first->fqn),
                                            torch_name(first->dtype)));
}

// Warns of tensors that --dtype does not cast, or that an optimizer does not train.
void warn_of_kept(const ParsedFlags& parsed, const Recipe& recipe, Checkpoint& checkpoint) {
  if (parsed.dtype) {
    warn_of_kept(recipe, checkpoint,
                 "--dtype casts only float32, bfloat16, float16, and FP8 with scales",
                 [](const TensorSpec& spec) {
                   return can_require_grad(spec.dtype) && !is_castable(spec.dtype);
                 });
  }
  const auto& stored = checkpoint.manifest.tensors;
  const bool has_scales = std::any_of(stored.begin(), stored.end(), [](const StoredTensor& tensor) {
    return tensor.scale.has_value();
  });
  const std::string& method = checkpoint.config.quant_method;
  if ((!parsed.dtype && !parsed.optimizer) || method.empty() || has_scales) return;
  warn_of_kept(recipe, checkpoint,
               fmt::format("codes of quantization method '{}' are not dequantised, and not trained",
                           printable(method)),
               [](const TensorSpec& spec) {
                 const bool is_packed =
                     spec.dtype == DType::u8 || spec.dtype == DType::i8 || spec.dtype == DType::i32;
                 return is_packed && spec.shape.size() > 1;
               });
}

// Warns of parameters over which int8-moments-24 is int8-moments: only a bfloat16 parameter has a
// master of 24 bits.
void warn_of_whole_masters(const ParsedFlags& parsed, const Recipe& recipe,
                           Checkpoint& checkpoint) {
  if (parsed.optimizer != StateFormat::int8_moments_24) return;
  const std::vector<uint32_t> trained = trained_targets(recipe);
  size_t count = 0;
  const TensorSpec* first = nullptr;
  for (const uint32_t t : trained) {
    const TensorSpec& spec = recipe.targets[t].spec;
    if (row_of(state_format_of(spec.dtype, spec.shape, *parsed.optimizer)).is_split()) continue;
    if (count++ == 0) first = &spec;
  }
  if (count == 0) return;
  checkpoint.warnings.push_back(fmt::format(
      "adamw:int8-moments-24 is adamw:int8-moments for {} of {} trained parameters, which are not "
      "bfloat16: their master keeps 32 bits; the first is {} ({})",
      count, trained.size(), printable(first->fqn), torch_name(first->dtype)));
}

Run run_of(FileSystem& files, const RunFlags& flags, const ParsedFlags& parsed,
           Checkpoint checkpoint, std::optional<std::string> recipe) {
  Run run{.files = &files,
          .checkpoint = std::move(checkpoint),
          .options = parsed.options,
          .optimizer = parsed.optimizer,
          .staging_given = !flags.staging.empty(),
          .on_device = flags.on_device};
  run.recipe = recipe_of(flags, run.checkpoint, parsed.dtype, std::move(recipe));
  parsed.frozen.mark(run.recipe);
  warn_of_unused(run.recipe, run.checkpoint);
  warn_of_kept(parsed, run.recipe, run.checkpoint);
  warn_of_whole_masters(parsed, run.recipe, run.checkpoint);
  run.layout = asked_layout(flags, targets_of(run.recipe));
  if (run.optimizer) run.options.after = {step_phase_of(run, *run.optimizer)};
  return run;
}

}  // namespace

int ranks_per_node_of(const Run& run) noexcept {
  const int ranks = run.options.ranks_per_node;
  return ranks > 0 ? ranks : run.layout.world_size();
}

Phase step_phase_of(const Run& run, StateFormat format) {
  std::optional<int> device_threads;
  if (run.on_device) device_threads = run.options.threads;
  return step_phase(run.recipe, run.layout, format, device_threads);
}

namespace {

// Of config.json alone: the checkpoint that synth would write.
Checkpoint open_or_expect(FileSystem& files, const std::string& path) {
  const std::optional<std::string> config = config_alone(files, path);
  if (!config) return open_checkpoint(files, path, Record::compared, Content::headers);
  const std::string text = text_of(files, *config, Category::format_limit);
  const uint64_t file_bytes = SynthOptions().shard_size_bytes;
  Checkpoint checkpoint = naming_file(base_name(*config), [&] {
    return unwritten_checkpoint(files, *config, text,
                                split_into_files(config_tensors(text), file_bytes));
  });
  checkpoint.warnings.emplace_back(
      "planned from config.json alone: names, shapes and files as the hub has them of this "
      "model_type");
  return checkpoint;
}

}  // namespace

Run open_run(FileSystem& files, const RunFlags& flags, Content content) {
  const ParsedFlags parsed = parsed_flags(flags);
  Checkpoint checkpoint = content == Content::headers ? open_or_expect(files, flags.directory)
                                                      : open_checkpoint(files, flags.directory);
  std::optional<std::string> recipe;
  if (!flags.recipe.empty()) recipe = text_of(files, flags.recipe, Category::mismatch);
  return run_of(files, flags, parsed, std::move(checkpoint), std::move(recipe));
}

Run run_of(FileSystem& files, RunFlags flags, Checkpoint checkpoint,
           std::optional<std::string> recipe) {
  flags.recipe.clear();
  return run_of(files, flags, parsed_flags(flags), std::move(checkpoint), std::move(recipe));
}

Plan plan_run(const Run& run, const Strategy& strategy, const std::optional<Budget>& budget) {
  PlanOptions options = run.options;
  options.strategy = &strategy;
  Plan plan = make_plan(run.checkpoint.manifest, run.recipe, run.layout, options);
  if (budget && !run.staging_given) return shrunk_to_fit(std::move(plan), *budget);
  return plan;
}

namespace {

void require_sense(const DeepSpeedFlags& deepspeed) {
  if (deepspeed.workers < 0 || deepspeed.workers > kMaxWorkers) {
    fail(Category::usage, "--workers out of range",
         {.expected = fmt::format("0 to {}", kMaxWorkers),
          .got = fmt::format("{}", deepspeed.workers)});
  }
  const std::string_view about_workers = deepspeed.persistent_workers ? "--persistent-workers"
                                         : deepspeed.protect          ? "--protect"
                                                                      : "";
  const std::string_view first = deepspeed.workers > 0 ? "--workers" : about_workers;
  if (deepspeed.config.empty() && !first.empty()) {
    fail(Category::usage, fmt::format("{} needs --deepspeed", first));
  }
  if (deepspeed.workers == 0 && !about_workers.empty()) {
    fail(Category::usage, fmt::format("{} needs --workers above 0", about_workers));
  }
}

// Nothing without --deepspeed.
std::optional<DeepSpeedTask> deepspeed_task(const RunFlags& flags, const DeepSpeedFlags& deepspeed,
                                            const Run& run) {
  if (deepspeed.config.empty()) return std::nullopt;
  DeepSpeedTask task{.config = naming_file(base_name(deepspeed.config), [&] {
                       const std::string text =
                           text_of(*run.files, deepspeed.config, Category::usage);
                       return read_deepspeed(text, flags.ranks);
                     })};
  task.sizes = trained_sizes(run.recipe);
  task.world = {.ranks = flags.ranks,
                .ranks_of_node = std::min(flags.ranks, ranks_per_node_of(run)),
                .workers = deepspeed.workers,
                .persistent_workers = deepspeed.persistent_workers,
                .protect = deepspeed.protect,
                .baseline_bytes = flags.baseline.empty() ? 0 : run.options.baseline_bytes};
  return task;
}

// The bytes of parameters that each rank has on its device, padding included.
std::vector<uint64_t> device_bytes_of(const Run& run) {
  const Plan plan = plan_run(run, *run.options.strategy, std::nullopt);
  std::vector<uint64_t> bytes_of(static_cast<size_t>(plan.ranks()));
  for_each_replica_group(plan.layout, [&](std::span<const int> ranks) {
    uint64_t bytes = 0;
    for (uint32_t b = 0; b < buffer_count(plan); ++b) {
      bytes += buffer_of(plan, b, ranks.front()).bytes();
    }
    for (const int rank : ranks) bytes_of[static_cast<size_t>(rank)] = bytes;
  });
  return bytes_of;
}

// The budget of --budget, else the limit of the earlier run of --from. With --from, a budget is
// required.
std::optional<Budget> planned_budget(const RunFlags& flags, const PlanFlags& more,
                                     const std::optional<PastRun>& past) {
  std::optional<Budget> budget;
  if (!more.budget.empty()) {
    budget = budget_of(more.budget, nodes_of(flags));
  } else if (past && past->limit_bytes) {
    budget = Budget{*past->limit_bytes, past->file};
  }
  if (budget || !past) return budget;
  fail(Category::usage, "--from: there is no limit to fit; give one with --budget",
       {.file = past->file});
}

}  // namespace

PlanReport plan_report(FileSystem& files, const RunFlags& flags, const PlanFlags& of_plan,
                       const JobOfPlan& job) {
  const DeepSpeedFlags& deepspeed = of_plan.deepspeed;
  require_sense(deepspeed);
  std::optional<PastRun> past;
  if (!of_plan.from.empty()) {
    past = read_past_run(text_of(files, of_plan.from, Category::usage), base_name(of_plan.from));
  }
  const Run run = open_run(files, flags, Content::headers);
  PlanReport report{.checkpoint = facts_of(run.checkpoint),
                    .ranks = flags.ranks,
                    .strategy = run.options.strategy->name,
                    .past = past,
                    .baseline = {run.options.baseline_bytes, !flags.baseline.empty()},
                    .inputs = inputs_of(flags, of_plan, run),
                    .optimizer = run.optimizer ? optimizer_text(run) : ""};
  if (run.on_device) report.device_bytes = device_bytes_of(run);
  const std::optional<DeepSpeedTask> training = deepspeed_task(flags, deepspeed, run);
  if (training) report.deepspeed = training->forecast();
  report.budget = planned_budget(flags, of_plan, past);
  uint64_t needed_bytes = 0;
  std::optional<Traffic> of_own_shards;
  for (const Strategy& strategy : strategies()) {
    Plan plan = plan_run(run, strategy, report.budget);
    if (report.budget && &strategy == run.options.strategy) {
      report.refusal = refusal_of(plan.promise, *report.budget);
      report.fits = !report.refusal;
    }
    // Without replicas, replica-striped reads as own-shard does, so it gets own-shard's traffic.
    const bool reads_own_shards = strategy.reader == Reader::replicas && !plan.staging.exchanges;
    const Traffic counted = reads_own_shards && of_own_shards ? *of_own_shards : traffic(plan);
    if (strategy.name == "own-shard") of_own_shards = counted;
    needed_bytes = std::max(needed_bytes, counted.needed_bytes);  // 0 with some strategies
    report.strategies.push_back({strategy.name, std::move(plan.promise), counted});
  }
  for (StrategyReport& strategy_report : report.strategies)
    strategy_report.needed_bytes = needed_bytes;
  if (report.budget && has_forecast(report)) {
    report.wider_refusal = refusal_of_deepspeed(report);
    report.deepspeed_fits = !report.wider_refusal;
  }
  job.extend(run, report);
  if (report.refusal || !report.job_fits.value_or(true))
    report.alternatives = would_fit(flags, run, *report.budget, job.fits);
  if (!report.deepspeed_fits.value_or(true)) {
    for (Alternative& other : would_fit(flags, run, *training, *report.budget, job.fits)) {
      report.alternatives.push_back(std::move(other));
    }
  }
  return report;
}

}  // namespace modicum
