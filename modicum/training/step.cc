#include "modicum/training/step.h"

#include <algorithm>
#include <array>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/training/children.h"
#include "modicum/training/step_rank.h"

namespace modicum {
namespace {

constexpr int kSlotsPerThread = 2;  // of the ring

// Of every rank before and while it steps.
Promise promise_of(const StepTask& task) {
  std::vector<Phase> phases = {{"compare", {}}, {"step", {}}};
  // Those of another epoch live beside the first.
  const uint64_t children_bytes = static_cast<uint64_t>(task.children) * 2 * kChildBytes;
  for (int rank = 0; rank < task.ranks; ++rank) {
    const AdamWSpec spec = spec_of(task, rank);
    Footprint compare;
    if (task.compares) compare = baseline_footprint({spec, task.threads, ring_bytes(task)});
    Footprint step = training_footprint(std::array{AdamWCount(spec)});
    step[Purpose::staging] += round_up(ring_bytes(task), kPageBytes);
    step[Purpose::process] = children_bytes;
    phases[0].of_rank.push_back(compare);
    phases[1].of_rank.push_back(step);
  }
  return make_promise(std::move(phases));
}

double median(std::array<double, Baselines::kRounds> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// A round lasts as long as its slowest rank.
void compare(StepReport& report, const std::vector<StepOutcome>& outcomes) {
  Baselines slowest;
  const auto raise = [](auto& of, const auto& by) {
    for (size_t i = 0; i < of.size(); ++i) of[i] = std::max(of[i], by[i]);
  };
  for (const StepOutcome& outcome : outcomes) {
    raise(slowest.copy_s, outcome.baselines.copy_s);
    raise(slowest.unfused_s, outcome.baselines.unfused_s);
    raise(slowest.fused_s, outcome.baselines.fused_s);
    slowest.copied_bytes += outcome.baselines.copied_bytes;
  }
  report.copy_bytes_per_s = static_cast<double>(slowest.copied_bytes) / median(slowest.copy_s);
  report.speedup_vs_unfused = median(slowest.unfused_s) / median(slowest.fused_s);
}

void add_held(StepReport& report, const std::vector<StepOutcome>& outcomes) {
  std::array<int64_t, 2> kernel{}, ledger{};
  for (const StepOutcome& outcome : outcomes) {
    report.fixed_bytes += outcome.fixed_bytes;
    for (size_t i = 0; i < kernel.size(); ++i) {
      kernel[i] += static_cast<int64_t>(outcome.kernel_bytes[i] - outcome.fixed_bytes);
      ledger[i] += static_cast<int64_t>(outcome.ledger_bytes[i]);
    }
  }
  const auto per_param = [&](size_t i) {
    const auto params = static_cast<double>(report.params);
    return HeldPerParam{static_cast<double>(ledger[i]) / params,
                        static_cast<double>(kernel[i]) / params};
  };
  report.step_1 = per_param(0);
  report.last_step = per_param(1);
}

StepReport report_of(const StepWorld& world, const std::optional<Budget>& budget) {
  const StepTask& task = world.task;
  std::vector<StepOutcome> outcomes;
  StateDigest digest;
  for (int rank = 0; rank < task.ranks; ++rank) {
    outcomes.push_back(world.board.posted_value<StepOutcome>(rank));
    digest += outcomes.back().digest;
  }
  const StepsTaken& taken = outcomes[0].taken;
  StepReport report{.format = task.format,
                    .params = task.params,
                    .threads = task.threads,
                    .steps = task.steps,
                    .skipped_steps = taken.skipped,
                    .seed = task.seed,
                    .grad_dtype = task.grad_dtype,
                    .isa = std::string(isa()),
                    .children = task.children,
                    .promise = world.promise,
                    .budget = budget,
                    .bytes_per_param_moved = bytes_per_param_moved(task),
                    .step_s = taken.step_s,
                    .max_norm = task.max_norm,
                    .state_digest = digest.state,
                    .master_digest = digest.master};
  for (const std::string_view name : isas_not_run()) report.isas_not_run.emplace_back(name);
  add_held(report, outcomes);
  if (task.compares) compare(report, outcomes);
  if (taken.norm.finite) report.grad_norm = taken.norm.norm(taken.unscale);
  if (task.loss_scale) report.loss_scale = taken.loss_scale.scale;
  return report;
}

}  // namespace

AdamWSpec spec_of(const StepTask& task, int rank) {
  const int64_t buckets = ceil_div(task.params, kBucketElements);
  const auto cut = [&](int64_t r) {
    return std::min(task.params, buckets * r / task.ranks * kBucketElements);
  };
  ShardSpec shard{.fqn = "weight", .runs = {{cut(rank), cut(rank + 1) - cut(rank)}}};
  if (shard.runs[0].n == 0) shard.runs.clear();
  return {.format = task.format, .shards = {std::move(shard)}, .seed = task.seed};
}

uint64_t ring_bytes(const StepTask& task) noexcept {
  if (row_of(task.format).is_split()) return 0;
  return static_cast<uint64_t>(task.threads) * kSlotsPerThread * kRingSlotBytes;
}

double bytes_per_param_moved(const StepTask& task) noexcept {
  return bytes_moved_per_parameter(task.format, ring_bytes(task) > 0);
}

uint64_t bytes_to_move(const StepTask& task) noexcept {
  return static_cast<uint64_t>(bytes_per_param_moved(task) * static_cast<double>(task.params) *
                               task.steps);
}

StepReport step_in_ranks(const StepTask& task, const std::optional<Budget>& budget,
                         ShowBytes show) {
  const Promise promise = promise_of(task);
  if (budget) require_fits(promise, *budget);
  SteadyClock clock;
  SharedBoard board(task.ranks, clock);
  const NormPage page(task.ranks);
  const StepWorld world{task, promise, clock, board, page};
  run_watched(
      board, clock, [&world](int rank) { be_step_rank(world, rank); }, show);
  return report_of(world, budget);
}

}  // namespace modicum
