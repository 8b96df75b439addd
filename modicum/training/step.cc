#include "modicum/training/step.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "modicum/baselines/baselines.h"
#include "modicum/kernels/kernels.h"
#include "modicum/probe/probe.h"
#include "modicum/training/children.h"
#include "modicum/training/lock_step.h"

namespace modicum {
namespace {

constexpr int kSlotsPerThread = 2;  // slots of the ring for low-precision copies

struct StepWorld : World {
  StepWorld(const StepTask& step_task, const Promise& promised, uint64_t copied, RankRunner ranks)
      : World(step_task.ranks, ranks),
        task(step_task),
        promise(promised),
        copy_bytes(copied),
        page(step_task.ranks) {}

  const StepTask& task;
  const Promise& promise;
  const uint64_t copy_bytes;  // per rank: see copy_bytes_of
  const NormPage page;
};

// The outcome of a rank. Plain data, since it is sent from the rank's process.
struct StepOutcome {
  // Memory of this rank before its state is allocated; rank 0 adds the launcher's.
  uint64_t fixed_bytes = 0;
  // The peaks in step 1, and in the later steps.
  std::array<uint64_t, 2> kernel_bytes{};  // of this rank with its children
  std::array<uint64_t, 2> ledger_bytes{};  // of the charges that the optimizer adds
  Baselines baselines;
  StepsTaken taken;
  StateDigest digest;  // this rank's part
};

// A rank's shard of the only parameter, cut at the ends of buckets.
AdamWSpec spec_of(const StepTask& task, int rank) {
  const int64_t buckets = ceil_div(task.params, kBucketElements);
  const auto cut = [&](int64_t r) {
    return std::min(task.params, buckets * r / task.ranks * kBucketElements);
  };
  ShardSpec shard{.fqn = "weight", .runs = {{cut(rank), cut(rank + 1) - cut(rank)}}};
  if (shard.runs[0].n == 0) shard.runs.clear();
  return {.format = task.format, .shards = {std::move(shard)}, .seed = task.seed};
}

// The size of the ring for low-precision copies of an fp32 master; 0 if the master is split.
uint64_t ring_bytes(const StepTask& task) noexcept {
  if (row_of(task.format).is_split()) return 0;
  return static_cast<uint64_t>(task.threads) * kSlotsPerThread * kRingSlotBytes;
}

double bytes_per_param_moved(const StepTask& task) noexcept {
  return bytes_moved_per_parameter(task.format, ring_bytes(task) > 0);
}

BaselineTask baseline_of(const StepTask& task, int rank, uint64_t copy_bytes) {
  return {spec_of(task, rank), task.threads, ring_bytes(task), copy_bytes};
}

class StepRank {
 public:
  StepRank(StepWorld& world, int rank)
      : world_(world),
        task_(world.task),
        rank_(rank),
        ledger_(world.promise.ledger_limit_bytes(rank), world.reporter(rank)) {
    ledger_.reporter().promise(world.promise, rank);
  }

  StepOutcome live() {
    if (task_.compares) {
      const ReportedPhase phase(ledger_.reporter(), "compare");
      const auto line_up = [this] {
        world_.board.barrier(rank_);
        world_.page.line_up(world_.board);
      };
      outcome_.baselines = measure_baselines(baseline_of(task_, rank_, world_.copy_bytes), ledger_,
                                             line_up, world_.clock);
    }
    const MadeGradients gradients(task_.seed, task_.threads, ledger_);
    const Buffer ring = ledger_.charge(Purpose::staging, ring_bytes(task_));
    world_.board.barrier(rank_);
    outcome_.fixed_bytes = tree_bytes(nullptr);
    fixed_of_ledger_ = ledger_.footprint().total();
    world_.board.barrier(rank_);
    can_reset_ = reset_peak_rss();
    ledger_.mark();
    RankOptimizer optimizer(trained(), gradients, ledger_, task_.threads);
    optimizer.make_masters();
    take_steps(optimizer, ring.bytes());
    outcome_.digest = optimizer.digest();
    return outcome_;
  }

 private:
  std::vector<TrainedGroup> trained() const {
    std::vector<TrainedGroup> trained(1);
    trained[0] = {spec_of(task_, rank_), {task_.grad_dtype}, {nullptr}};
    return trained;
  }

  void take_steps(RankOptimizer& optimizer, std::span<std::byte> ring) {
    const AdamWSpec spec = spec_of(task_, rank_);
    LockStep steps(
        optimizer, {rank_, &world_.board, &world_.page, &world_.clock, ledger_.reporter()},
        {.max_norm = task_.max_norm,
         .loss_scale = task_.loss_scale,
         .ring = ring,
         .bytes_of_step = static_cast<uint64_t>(bytes_per_param_moved(task_) *
                                                static_cast<double>(spec.shards[0].numel()))});
    const Children children(task_.children);
    for (int step = 1; step <= task_.steps; ++step) {
      // In the middle step there are two sets of children, as if a data loader started the workers
      // of the next epoch before it ended those of the previous one.
      std::optional<Children> more;
      if (step > 1 && step == task_.steps / 2 + 1) more.emplace(task_.children);
      steps.step(step);
      if (step == 1) note_held(0, children);
    }
    note_held(1, children);
    outcome_.taken = steps.finish(task_.steps);
  }

  // The memory of this rank and its children; rank 0 adds the launcher's. If `children` is given
  // and the kernel can reset peaks, the rank's own part is its peak since the last note_held. All
  // other parts are current values.
  uint64_t tree_bytes(const Children* children) const {
    const ProcessMemory memory = read_process_memory();
    uint64_t sum = children != nullptr && can_reset_ ? memory.peak_held() : memory.held_bytes();
    if (children != nullptr) sum += children->held_bytes();
    if (rank_ == 0) sum += read_process_memory(world_.launcher_pid).held_bytes();
    return sum;
  }

  // Stores the peaks since the last call. All ranks call it at the same time, and none goes on
  // until all have read their peaks.
  void note_held(size_t which, const Children& children) {
    world_.board.barrier(rank_);
    outcome_.kernel_bytes[which] = tree_bytes(&children);
    outcome_.ledger_bytes[which] = ledger_.peak_since_mark() - fixed_of_ledger_;
    world_.board.barrier(rank_);
    ledger_.mark();
    static_cast<void>(reset_peak_rss());
  }

  StepWorld& world_;
  const StepTask& task_;
  const int rank_;
  Ledger ledger_;
  StepOutcome outcome_;
  uint64_t fixed_of_ledger_ = 0;
  bool can_reset_ = false;
};

// The phases are `copy` and `compare`, which measure memcpy and other optimizers for the
// comparison, and `step`.
Promise promise_of(const StepTask& task, uint64_t copy_bytes) {
  std::vector<Phase> phases = {{"copy", {}}, {"compare", {}}, {"step", {}}};
  // Two sets of children coexist: see take_steps.
  const uint64_t children_bytes = static_cast<uint64_t>(task.children) * 2 * kChildBytes;
  for (int rank = 0; rank < task.ranks; ++rank) {
    const AdamWSpec spec = spec_of(task, rank);
    const BaselineTask baseline = baseline_of(task, rank, copy_bytes);
    phases[0].of_rank.push_back(task.compares ? copy_footprint(baseline) : Footprint());
    phases[1].of_rank.push_back(task.compares ? baseline_footprint(baseline) : Footprint());
    Footprint step = training_footprint(std::array{AdamWCount(spec)});
    step[Purpose::staging] += round_up(ring_bytes(task), kPageBytes);
    step[Purpose::process] = children_bytes;
    phases[2].of_rank.push_back(step);
  }
  return make_promise(std::move(phases), kBaselineBytes + thread_bytes(task.threads));
}

// The memory of each rank's buffers for the memcpy that steps are compared with: the full size, or
// as much as the budget leaves, but at least half of the memory that the compared steps need.
uint64_t copy_bytes_of(const StepTask& task, const std::optional<Budget>& budget) {
  const uint64_t wanted = 2 * kCopyPieceBytes * static_cast<uint64_t>(task.threads);
  if (!budget) return wanted;
  const uint64_t peak = promise_of(task, wanted).node_peak_bytes(0);
  if (peak <= budget->bytes) return wanted;
  const auto ranks = static_cast<uint64_t>(task.ranks);
  // Two pages, since both buffers are rounded up to pages.
  const uint64_t over = ceil_div(peak - budget->bytes, ranks) + 2 * kPageBytes;
  const uint64_t least = baseline_footprint(baseline_of(task, 0, 0)).total() / 2;
  return std::max(wanted - std::min(wanted, over), least);
}

double median(std::array<double, Baselines::kRounds> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// A round takes as long as its slowest rank.
void compare(StepReport& report, const std::vector<StepOutcome>& outcomes) {
  Baselines slowest;
  const auto raise = [](auto& maxima, const auto& by) {
    for (size_t i = 0; i < maxima.size(); ++i) maxima[i] = std::max(maxima[i], by[i]);
  };
  for (const StepOutcome& outcome : outcomes) {
    raise(slowest.memcpy_s, outcome.baselines.memcpy_s);
    raise(slowest.streaming_s, outcome.baselines.streaming_s);
    raise(slowest.unfused_s, outcome.baselines.unfused_s);
    raise(slowest.fused_s, outcome.baselines.fused_s);
    slowest.copied_bytes += outcome.baselines.copied_bytes;
  }
  report.copy_bytes_per_s = static_cast<double>(slowest.copied_bytes) /
                            std::min(median(slowest.memcpy_s), median(slowest.streaming_s));
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
    const auto params = static_cast<double>(report.task.params);
    return HeldPerParam{static_cast<double>(ledger[i]) / params,
                        static_cast<double>(kernel[i]) / params};
  };
  report.step_1 = per_param(0);
  report.last_step = per_param(1);
}

}  // namespace

uint64_t bytes_to_move(const StepTask& task) noexcept {
  return static_cast<uint64_t>(bytes_per_param_moved(task) * static_cast<double>(task.params) *
                               task.steps);
}

StepReport step_in_ranks(const StepTask& task, const std::optional<Budget>& budget,
                         RankRunner run_ranks, ShowBytes show) {
  const uint64_t copy_bytes = copy_bytes_of(task, budget);
  const Promise promise = promise_of(task, copy_bytes);
  if (budget) require_fits(promise, *budget);
  StepWorld world(task, promise, copy_bytes, run_ranks);
  if (budget) world.budget_bytes = budget->bytes;
  const std::vector<StepOutcome> outcomes = outcomes_of<StepRank>(world, show);
  StateDigest digest;
  for (const StepOutcome& outcome : outcomes) digest += outcome.digest;
  const StepsTaken& taken = outcomes[0].taken;
  StepReport report{.task = task,
                    .skipped_steps = taken.skipped,
                    .isa = std::string(isa()),
                    .promise = promise,
                    .budget = budget,
                    .bytes_per_param_moved = bytes_per_param_moved(task),
                    .step_s = taken.step_s,
                    .state_digest = digest.state,
                    .master_digest = digest.master};
  for (const std::string_view name : isas_not_run()) report.isas_not_run.emplace_back(name);
  add_held(report, outcomes);
  if (task.compares) compare(report, outcomes);
  if (taken.norm.finite) report.grad_norm = taken.norm.norm(taken.unscale);
  if (task.loss_scale) report.loss_scale = taken.loss_scale.scale;
  return report;
}

}  // namespace modicum
