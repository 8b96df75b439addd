// A rank's life in `step`.
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/probe/probe.h"
#include "modicum/training/step.h"

namespace modicum {
namespace {

// Processes that a rank has forked and that do nothing, as a data loader's workers between batches.
class Children {
 public:
  explicit Children(int count) {
    const pid_t parent = getpid();
    for (int i = 0; i < count; ++i) {
      const pid_t pid = fork();
      if (pid == 0) idle(parent);
      if (pid < 0) fail(Category::no_memory, "a child process could not be started");
      pids_.push_back(pid);
    }
  }
  ~Children() {
    for (const pid_t pid : pids_) kill(pid, SIGKILL);
    for (const pid_t pid : pids_) waitpid(pid, nullptr, 0);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  uint64_t held_bytes() const {
    uint64_t sum = 0;
    for (const pid_t pid : pids_) sum += read_process_memory(pid).held();
    return sum;
  }

 private:
  [[noreturn]] static void idle(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "modicum-child");
    if (getppid() != parent) _exit(0);
    while (true) pause();
  }
  std::vector<pid_t> pids_;
};

// The slowest rank's time of the latest steps.
class StepTimes {
 public:
  void add(double seconds) { seconds_[static_cast<size_t>(count_++) % seconds_.size()] = seconds; }
  double median() {
    const auto end = seconds_.begin() + std::min<int64_t>(count_, seconds_.size());
    if (end == seconds_.begin()) return 0;
    const auto middle = seconds_.begin() + (end - seconds_.begin()) / 2;
    std::nth_element(seconds_.begin(), middle, end);
    return *middle;
  }

 private:
  std::array<double, 1024> seconds_{};
  int64_t count_ = 0;
};

class StepWorker {
 public:
  StepWorker(const StepRank& of, int rank)
      : of_(of),
        rank_(rank),
        ledger_(of.promise.ledger_limit_bytes(rank)),
        staging_(ledger_.charge(Purpose::staging, gradient_staging_bytes(of.run.threads))),
        ring_(ledger_.charge(Purpose::staging, ring_bytes(of.run))),
        grad_dtype_{of.run.grad_dtype},
        gradients_(of.run.seed, of.run.threads, staging_.bytes()) {
    if (of.run.loss_scale) outcome_.loss_scale.scale = *of.run.loss_scale;
  }

  void run() {
    if (of_.run.compares) {
      outcome_.baselines = measure_baselines(
          of_.run, rank_, ledger_, [this] { line_up(); }, of_.clock);
    }
    of_.board.barrier(rank_);
    outcome_.fixed_bytes = tree_bytes(nullptr);
    const uint64_t fixed_of_ledger = ledger_.held().total();
    of_.board.barrier(rank_);
    can_reset_ = reset_peak_rss();
    ledger_.mark();
    AdamW state(of_.run.spec(rank_), ledger_, of_.run.threads);
    gradients_.make_masters(state);
    const Children children(of_.run.children);
    for (int step = 1; step <= of_.run.steps; ++step) {
      one_step(state, step);
      if (step == 1) look(0, children, fixed_of_ledger);
    }
    look(1, children, fixed_of_ledger);
    const int end = of_.run.steps + 1;
    of_.lanes.lane(end, rank_) = {outcome_.norm, last_step_s_};
    of_.board.barrier(rank_);
    note_time(end);
    outcome_.digest = state.digest();
    outcome_.step_s = times_.median();
    of_.board.post(rank_, std::as_bytes(std::span(&outcome_, 1)));
    of_.board.barrier(rank_);
  }

 private:
  void line_up() {
    of_.board.barrier(rank_);
    of_.lanes.line_up(of_.board);
  }

  // What this rank answers for, its highest since the last look.
  uint64_t tree_bytes(const Children* children) const {
    const ProcessMemory own = read_process_memory();
    uint64_t sum = children != nullptr && can_reset_ ? own.peak_held() : own.held();
    if (children != nullptr) sum += children->held_bytes();
    if (rank_ == 0) sum += read_process_memory(getppid()).held();
    return sum;
  }

  // All ranks look while nobody works. The first time at step 1, then at all that followed.
  void look(size_t which, const Children& children, uint64_t fixed_of_ledger) {
    of_.board.barrier(rank_);
    outcome_.kernel_bytes[which] = tree_bytes(&children);
    outcome_.ledger_bytes[which] = ledger_.peak_since_mark() - fixed_of_ledger;
    of_.board.barrier(rank_);
    ledger_.mark();
    static_cast<void>(reset_peak_rss());
  }

  void one_step(AdamW& state, int step) {
    const float scale = of_.run.loss_scale ? outcome_.loss_scale.scale : 1.0F;
    gradients_.deliver(state, {step, grad_dtype_, scale}, [this] { of_.board.beat(rank_, 0); });
    // In the middle of the run the loaders of another epoch live beside the first for a step.
    std::optional<Children> more;
    if (step > 1 && step == of_.run.steps / 2 + 1) more.emplace(of_.run.children);

    of_.lanes.lane(step, rank_) = {state.norm(), last_step_s_};
    line_up();
    outcome_.norm = of_.lanes.norm(step);
    note_time(step);
    outcome_.unscale = of_.run.loss_scale ? outcome_.loss_scale.unscale() : 1.0F;
    last_step_s_ = 0;
    if (outcome_.norm.finite) {
      step_timed(state);
    } else {
      state.skip();
      ++outcome_.skipped_steps;
    }
    if (of_.run.loss_scale) outcome_.loss_scale.update(outcome_.norm.finite);
    const double moved = bytes_moved_per_parameter(of_.run.format, ring_bytes(of_.run) > 0);
    of_.board.beat(rank_,
                   static_cast<uint64_t>(moved * static_cast<double>(state.shard(0).numel())));
  }

  // The time of the step before.
  void note_time(int step) {
    double slowest_s = 0;
    for (int rank = 0; rank < of_.run.ranks; ++rank) {
      slowest_s = std::max(slowest_s, of_.lanes.lane(step, rank).last_step_s);
    }
    if (slowest_s > 0) times_.add(slowest_s);
  }

  void step_timed(AdamW& state) {
    const Outlet outlet{.ring = ring_.bytes(), .send = [](const ReadyChunk&) {}};
    StepOptions options{.unscale = outcome_.unscale};
    if (of_.run.max_norm) {
      options.clip = clip_factor(outcome_.norm.norm(outcome_.unscale), *of_.run.max_norm);
    }
    if (!ring_.empty()) options.outlet = &outlet;
    const int64_t begin = of_.clock.now_ns();
    state.step(options);
    last_step_s_ = static_cast<double>(of_.clock.now_ns() - begin) / kNsPerSecond;
  }

  const StepRank& of_;
  const int rank_;
  Ledger ledger_;
  const Buffer staging_;
  const Buffer ring_;
  const std::array<DType, 1> grad_dtype_;
  const MadeGradients gradients_;
  StepOutcome outcome_;
  StepTimes times_;
  double last_step_s_ = 0;
  bool can_reset_ = false;
};

}  // namespace

void be_step_rank(const StepRank& of, int rank) {
  static_assert(sizeof(StepOutcome) <= SharedBoard::kResultBytes);
  StepWorker(of, rank).run();
}

}  // namespace modicum
