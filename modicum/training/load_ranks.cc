#include "modicum/training/load_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "modicum/training/loading_rank.h"
#include "modicum/training/optimizer.h"

namespace modicum {
namespace {

std::string dump_path(const LoadTask& task, int rank) {
  return join_path(task.dump, fmt::format("rank-{:05d}.safetensors", rank));
}

// The directory of a dump, removed with the files in it unless finish() was called.
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
      // Ignored, since the failure that ended the load is reported.
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

// Digests elements and drops them. With --check first compares them with the checkpoint, one thread
// at a time, since the threads share an Expectation.
class DigestSink {
 public:
  DigestSink(const LoadTask& task, int rank, const RankLoad& load)
      : task_(task),
        rank_(rank),
        expectation_(task.run.checkpoint, [&load] { load.beat(); }),
        digested_(task.plan, rank) {}
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

class LoadRank {
 public:
  LoadRank(LoadWorld& world, int rank)
      : world_(world),
        task_(world.task),
        board_(world.board),
        rank_(rank),
        loading_(world, rank,
                 [this](uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
                   dropped_->copy(buffer, at, elements);
                 }) {}

  RankOutcome live() {
    RankLoad& load = loading_.load;
    if (task_.run.options.destination == Destination::copy) dropped_.emplace(task_, rank_, load);
    load.load();
    world_.compared.give(rank_, load.compared());
    if (task_.run.optimizer) {
      load.book_what_stays();
      naming_phase("step", [&] {
        gradients_.emplace(0, task_.threads, loading_.ledger);
        optimizer_.emplace(trained_of(task_.run, task_.plan, rank_, load.shards()), *gradients_,
                           loading_.ledger, task_.threads);
      });
    }
    board_.barrier(rank_);  // all ranks hold their shards until the last rank has loaded
    load.note_peaks();
    board_.barrier(rank_);  // all keep shared pages mapped until the last has read its peaks
    finish();
    return load.outcome();
  }

 private:
  // Checks, digests and dumps. Called after the peaks were read, so that they don't include this.
  void finish() {
    RankLoad& load = loading_.load;
    const auto heartbeat = [&load] { load.beat(); };
    if (dropped_) {
      load.outcome().digest = dropped_->digest();
      return;
    }
    if (task_.check) load.check_values();
    if (task_.digest) {
      load.outcome().digest = digest_of_rank(task_.plan, rank_, load.shards(), heartbeat);
    }
    if (task_.dump.empty()) return;
    dump_rank(task_.plan, rank_, load.shards(), {*task_.run.files, dump_path(task_, rank_)},
              heartbeat);
  }

  const LoadWorld& world_;
  const LoadTask& task_;
  SharedBoard& board_;
  const int rank_;
  LoadingRank loading_;
  std::optional<DigestSink> dropped_;
  std::optional<MadeGradients> gradients_;
  std::optional<RankOptimizer> optimizer_;  // only its memory is needed: it makes no step
};

}  // namespace

LoadReport load_in_ranks(const LoadTask& original, ShowBytes show) {
  LoadTask task = original;
  if (!task.dump.empty()) task.dump = real_directory(*task.run.files, task.dump);
  LoadWorld world(task);
  const StopSignals stop;  // a stop signal throws, so that the directory below is removed
  DumpDirectory dump(task);
  LoadReport report{.checkpoint = facts_of(task.run.checkpoint),
                    .strategy = task.plan.strategy().name,
                    .promise = task.plan.promise,
                    .full_per_rank = full_per_rank_promise(task.plan),
                    .ranks = outcomes_of<LoadRank>(world, show),
                    .checked = task.check};
  report.compared = world.compared.merged();
  dump.finish();
  report.launcher = world.launcher_memory();
  report.cgroup_peak_bytes = world.cgroup_peak.bytes();
  uint64_t digest = 0;
  for (const RankOutcome& outcome : report.ranks) {
    report.elapsed_s = std::max(report.elapsed_s, world.seconds_until(outcome.loaded_ns));
    report.check_s = std::max(report.check_s, static_cast<double>(outcome.check_ns) / kNsPerSecond);
    digest += outcome.digest;
  }
  if (task.digest) report.digest = digest;
  return report;
}

}  // namespace modicum
