// The cheapest changes after which a training that DeepSpeed would run fits, and the same training
// with Modicum's AdamW.
#include <fmt/format.h>

#include <array>
#include <string>
#include <tuple>

#include "modicum/runs/cheapest.h"
#include "modicum/runs/runs.h"

namespace modicum {
namespace {

// A set of changes to DeepSpeed's training, which keeps the formats of its state.
struct DeepSpeedChange {
  bool protect = false;
  bool persistent_workers = false;
  bool pageable = false;   // no buffer is pinned
  bool stage_3 = false;    // in place of 1 or 2
  bool no_params = false;  // offload_param is off
  bool nodes = false;      // fewer ranks per node

  int count() const noexcept {
    return int{protect} + int{persistent_workers} + int{pageable} + int{stage_3} + int{no_params} +
           int{nodes};
  }
  auto rank() const noexcept { return std::tuple(nodes, count()); }
  // With more nodes, further changes may need fewer of them.
  bool is_dearer_than(const DeepSpeedChange& found) const noexcept {
    return !nodes && !found.nodes && rank() > found.rank();
  }
};

bool pins(const DeepSpeedConfig& config) noexcept {
  return config.optimizer.pin_memory || (config.param.to_cpu && config.param.pin_memory);
}

// All sets of changes that would change the forecast's input, the preferred ones first.
std::vector<DeepSpeedChange> changes_of(const DeepSpeedTask& task, const Budget& budget) {
  const DeepSpeedConfig& config = task.config;
  const bool forks = task.world.workers > 0 && !task.world.protect;
  const std::array<std::pair<bool DeepSpeedChange::*, bool>, 5> possible = {
      {{&DeepSpeedChange::protect, forks},
       {&DeepSpeedChange::persistent_workers, forks && !task.world.persistent_workers},
       {&DeepSpeedChange::pageable, pins(config)},
       {&DeepSpeedChange::stage_3, config.stage < 3},
       {&DeepSpeedChange::no_params, config.param.to_cpu}}};
  std::vector<DeepSpeedChange> changes = {{}};
  for (const auto& [member, is_possible] : possible) {
    const size_t without = is_possible ? changes.size() : 0;
    for (size_t i = 0; i < without; ++i) {
      changes.push_back(changes[i]);
      changes.back().*member = true;
    }
  }
  add_nodes_and_sort(changes, !budget.is_shared);
  return changes;
}

DeepSpeedTask changed(DeepSpeedTask task, const DeepSpeedChange& change) {
  task.world.protect |= change.protect;
  task.world.persistent_workers |= change.persistent_workers;
  if (change.pageable) task.config.optimizer.pin_memory = task.config.param.pin_memory = false;
  if (change.stage_3) task.config.stage = 3;
  if (change.no_params) task.config.param.to_cpu = false;
  return task;
}

std::string flags_of(const DeepSpeedChange& change, int ranks_per_node) {
  std::vector<std::string> flags;
  if (change.protect) flags.emplace_back("--protect");
  if (change.persistent_workers) flags.emplace_back("--persistent-workers");
  if (change.nodes) flags.push_back(fmt::format("--ranks-per-node {}", ranks_per_node));
  return fmt::format("{}", fmt::join(flags, " "));
}

// What the changes mean for the program.
std::string note_of(const DeepSpeedChange& change, const DeepSpeedForecast& forecast) {
  std::vector<std::string> notes;
  if (change.protect) {
    notes.emplace_back("call modicum.torch.protect(engine) before workers are forked");
  }
  if (change.persistent_workers) notes.emplace_back("DataLoader(persistent_workers=True)");
  if (change.pageable) notes.emplace_back("copies to devices are slower");
  if (change.stage_3) notes.emplace_back("devices gather the parameters of each layer");
  if (change.no_params) {
    notes.push_back(
        fmt::format("{} more on each device", format_size(2 * forecast.params_of_rank)));
  }
  return fmt::format("{}", fmt::join(notes, "; "));
}

std::optional<Alternative> try_change(const DeepSpeedChange& change, const DeepSpeedTask& asked,
                                      const Budget& budget) {
  DeepSpeedTask task = changed(asked, change);
  const auto of_ranks = [&](int ranks_of_node) -> std::optional<Alternative> {
    task.world.ranks_of_node = ranks_of_node;
    const DeepSpeedForecast forecast = task.forecast();
    const uint64_t bytes = forecast.on_node(forecast.peak_bytes());
    if (bytes > budget.bytes) return std::nullopt;
    return Alternative{.who = kDeepSpeed,
                       .ranks_per_node = ranks_of_node,
                       .peak_bytes = bytes,
                       .note = note_of(change, forecast),
                       .flags = flags_of(change, ranks_of_node),
                       .config = deepspeed_patch(asked.config, task.config)};
  };
  const int ranks_of_node = asked.world.ranks_of_node;
  return change.nodes ? most_per_node(asked.world.ranks, ranks_of_node, of_ranks)
                      : of_ranks(ranks_of_node);
}

// Runs with Modicum's AdamW: that of `run` with 32-bit state, or else what would_fit finds.
// Parameters are on devices, as with DeepSpeed, unless `has_params`: it has them on the host.
std::vector<Alternative> with_our_optimizer(const RunFlags& asked, const Run& run, bool has_params,
                                            const Budget& budget, FitsJob fits_job) {
  constexpr std::string_view kOptimizer = "--optimizer", kDevice = "--device";
  RunFlags flags = asked;
  flags.optimizer = "adamw:fp32";
  flags.on_device |= !has_params;
  const Run training = open_run(*run.files, flags, Content::headers);
  const Plan plan = plan_run(training, *training.options.strategy, budget);
  std::vector<Alternative> found;
  if (fits(plan.promise, budget) && fits_job(flags, training, plan.options)) {
    found.push_back({.strategy = plan.strategy().name,
                     .staging_bytes = plan.options.staging_bytes,
                     .state_format = training.optimizer,
                     .ranks_per_node = ranks_per_node_of(training),
                     .peak_bytes = plan.promise.node_peak_bytes(worst_node(plan.promise))});
  } else {
    found = would_fit(flags, training, budget, fits_job);
  }
  for (Alternative& alternative : found) {
    alternative.who = kInPlaceOfDeepSpeed;
    std::vector<std::string> words;
    if (flags.on_device && !asked.on_device) words.emplace_back(kDevice);
    if (alternative.flags.find(kOptimizer) == std::string::npos) {
      words.push_back(fmt::format("{} {}", kOptimizer, flags.optimizer));
    }
    if (!alternative.flags.empty()) words.push_back(alternative.flags);
    alternative.flags = fmt::format("{}", fmt::join(words, " "));
  }
  return found;
}

}  // namespace

std::vector<Alternative> would_fit(const RunFlags& flags, const Run& run, const DeepSpeedTask& task,
                                   const Budget& budget, FitsJob fits_job) {
  std::vector<Alternative> found =
      cheapest(changes_of(task, budget), task.world.ranks_of_node,
               [&](const DeepSpeedChange& change) { return try_change(change, task, budget); });
  for (Alternative& alternative : found) {
    alternative.strategy = run.options.strategy->name;
    alternative.staging_bytes = run.options.staging_bytes;
  }
  if (run.optimizer) return found;  // then the plan is about Modicum's AdamW, too
  try {
    for (Alternative& ours :
         with_our_optimizer(flags, run, task.config.param.to_cpu, budget, fits_job)) {
      found.push_back(std::move(ours));
    }
  } catch (const Error& error) {  // with these flags it trains nothing
    if (error.category() != Category::unsupported) throw;
  }
  return found;
}

}  // namespace modicum
