#include "modicum/training/load_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "modicum/memory/memory.h"
#include "modicum/probe/probe.h"
#include "modicum/training/optimizer.h"
#include "modicum/training/rank_load.h"

namespace modicum {
namespace {

std::string dump_path(const LoadTask& task, int rank) {
  return join_path(task.dump, fmt::format("rank-{:05d}.safetensors", rank));
}

// The directory of a dump, removed again with what the ranks have put there unless all of it is.
class DumpDirectory {
 public:
  explicit DumpDirectory(const LoadTask& task) : task_(task) {
    if (!task_.dump.empty()) files().make_directory(task_.dump);
  }
  ~DumpDirectory() {
    if (task_.dump.empty() || is_finished_) return;
    try {
      for (int rank = 0; rank < task_.plan.ranks(); ++rank) {
        if (files().exists(dump_path(task_, rank))) files().remove(dump_path(task_, rank));
      }
      files().remove(task_.dump);
    } catch (const Error&) {
      // The failure that brought us here is the one to report.
    }
  }
  DumpDirectory(const DumpDirectory&) = delete;
  DumpDirectory& operator=(const DumpDirectory&) = delete;
  void finish() noexcept { is_finished_ = true; }

 private:
  FileSystem& files() const noexcept { return *task_.run.files; }
  const LoadTask& task_;
  bool is_finished_ = false;
};

// What the rank processes share, made before they are forked.
struct LoadWorld {
  const LoadTask& task;
  SteadyClock& clock;
  SharedBoard& board;
  Rings& rings;
};

// Where elements go that are digested and dropped; compared on the way where that is asked for, by
// one thread at a time, since the file is shared.
class Dropped {
 public:
  Dropped(const LoadWorld& world, int rank, std::function<void()> heartbeat)
      : task_(world.task),
        rank_(rank),
        expectation_(task_.run.checkpoint, std::move(heartbeat)),
        digested_(task_.plan, rank) {}
  void copy(uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
    if (task_.check) {
      const std::lock_guard lock(mutex_);
      check_elements(task_.plan, {rank_, buffer, at, elements}, expectation_);
    }
    digested_.add(buffer, at, elements);
  }
  uint64_t digest() const noexcept { return digested_.value(); }

 private:
  const LoadTask& task_;
  const int rank_;
  std::mutex mutex_;
  Expectation expectation_;
  DigestSum digested_;
};

// One rank's life.
void be_rank(const LoadWorld& world, int rank) {
  const LoadTask& task = world.task;
  SharedBoard& board = world.board;
  reset_peak_rss();
  const uint64_t baseline_bytes = read_process_memory().held();
  Ledger ledger(task.plan.promise.ledger_limit_bytes(rank));
  const std::unique_ptr<Exchange> exchange = world.rings.end_of(rank, board);
  const auto heartbeat = [&board, rank] {
    board.check();
    board.beat(rank, 0);
  };
  std::optional<Dropped> dropped;
  HostSink::Copy copy;
  if (task.run.options.destination == Destination::copy) {
    dropped.emplace(world, rank, heartbeat);
    copy = [&dropped](uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
      dropped->copy(buffer, at, elements);
    };
  }
  RankLoad load({task.run.checkpoint,
                 task.plan,
                 {rank, &board, exchange.get(), &ledger},
                 world.clock,
                 {.threads = task.threads},
                 task.check},
                {}, copy);
  load.load();
  std::optional<MadeGradients> gradients;
  std::optional<RankOptimizer> optimizer;  // held, but not stepped
  if (task.run.optimizer) {
    load.book_what_stays();
    gradients.emplace(0, task.threads, ledger);
    optimizer.emplace(trained_of(task.run, task.plan, rank, load.shards()), *gradients, ledger,
                      task.threads);
  }
  board.barrier(rank);  // all hold their shards until the last has finished
  load.note_peaks();
  board.barrier(rank);  // and until all have noted what they share
  RankOutcome& outcome = load.outcome();
  outcome.baseline_bytes = baseline_bytes;
  if (dropped) {
    outcome.digest = dropped->digest();
  } else {
    if (task.check) load.check_values();
    if (task.digest) outcome.digest = digest_of_rank(task.plan, rank, load.shards(), heartbeat);
    if (!task.dump.empty()) {
      dump_rank(task.plan, rank, load.shards(), {*task.run.files, dump_path(task, rank)},
                heartbeat);
    }
  }
  board.post_value(rank, outcome);
  board.barrier(rank);
}

LoadReport report_of(const LoadWorld& world, int64_t begin_ns, uint64_t launcher_bytes) {
  const LoadTask& task = world.task;
  LoadReport report{.checkpoint = facts_of(task.run.checkpoint),
                    .strategy = task.plan.strategy().name,
                    .promise = task.plan.promise,
                    .launcher_bytes = launcher_bytes,
                    .checked = task.check};
  int64_t end_ns = begin_ns;
  int64_t check_ns = 0;
  uint64_t digest = 0;
  for (int rank = 0; rank < task.plan.ranks(); ++rank) {
    const auto outcome = world.board.posted_value<RankOutcome>(rank);
    end_ns = std::max(end_ns, outcome.loaded_ns);
    check_ns = std::max(check_ns, outcome.check_ns);
    digest += outcome.digest;
    report.ranks.push_back(outcome);
  }
  report.elapsed_s = static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  report.check_s = static_cast<double>(check_ns) / kNsPerSecond;
  if (task.digest) report.digest = digest;
  return report;
}

}  // namespace

LoadReport load_in_ranks(const LoadTask& task, ShowBytes show) {
  SteadyClock clock;
  SharedBoard board(task.plan.ranks(), clock);
  Rings rings(task.plan);
  const LoadWorld world{task, clock, board, rings};
  const StopSignals stop;  // the directory below is to be removed before this process ends
  DumpDirectory dump(task);
  const int64_t begin_ns = clock.now_ns();
  run_watched(
      board, clock, [&world](int rank) { be_rank(world, rank); }, show);
  dump.finish();
  return report_of(world, begin_ns, read_process_memory().held());
}

}  // namespace modicum
