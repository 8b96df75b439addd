#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "modicum/cli/verbs.h"
#include "modicum/memory/memory.h"
#include "modicum/probe/probe.h"
#include "modicum/ranks/ranks.h"
#include "modicum/stream/stream.h"
#include "modicum/training/training.h"

namespace modicum {
namespace {

struct LoadFlags {
  CommonFlags common;
  RunFlags run;
  std::string check;
  bool digest = false;
  std::string expect_digest;  // as `digest` is printed
  std::string dump;
};

std::string dump_path(const LoadFlags& flags, int rank) {
  return join_path(flags.dump, fmt::format("rank-{:05d}.safetensors", rank));
}

// The directory of `--dump`, removed again with what the ranks have put there unless all of it is.
class DumpDirectory {
 public:
  DumpDirectory(const LoadFlags& flags, FileSystem& files) : flags_(flags), files_(files) {
    if (!flags_.dump.empty()) files_.make_directory(flags_.dump);
  }
  ~DumpDirectory() {
    if (flags_.dump.empty() || is_finished_) return;
    try {
      for (int rank = 0; rank < flags_.run.ranks; ++rank) {
        if (files_.exists(dump_path(flags_, rank))) files_.remove(dump_path(flags_, rank));
      }
      files_.remove(flags_.dump);
    } catch (const Error&) {
      // The failure that brought us here is the one to report.
    }
  }
  DumpDirectory(const DumpDirectory&) = delete;
  DumpDirectory& operator=(const DumpDirectory&) = delete;
  void finish() noexcept { is_finished_ = true; }

 private:
  const LoadFlags& flags_;
  FileSystem& files_;
  bool is_finished_ = false;
};

// What the rank processes run, made before they are forked.
struct RankRun {
  const LoadFlags& flags;
  const Run& run;
  const Plan& plan;
  Clock& clock;
  SharedBoard& board;
  Rings& rings;
  int threads;
};

// For what a rank does after its load: it is alive, and wants to know whether the others are.
std::function<void()> alive(const RankRun& of, int rank) {
  return [&of, rank] {
    of.board.check();
    of.board.beat(rank, 0);
  };
}

void check_and_dump(const RankRun& of, int rank, HostSink& sink, RankOutcome& outcome) {
  if (!of.flags.check.empty()) {
    const int64_t begin = of.clock.now_ns();
    Expectation expectation(of.run.checkpoint, alive(of, rank));
    check_values(of.plan, rank, sink, expectation);
    outcome.check_ns = of.clock.now_ns() - begin;
  }
  if (of.flags.digest) outcome.digest = digest_of_rank(of.plan, rank, sink, alive(of, rank));
  if (!of.flags.dump.empty()) {
    dump_rank(of.plan, rank, sink, *of.run.files, dump_path(of.flags, rank), alive(of, rank));
  }
}

// What is dropped is compared on the way; one thread at a time, since the file is shared.
class DropCheck {
 public:
  DropCheck(const RankRun& of, int rank)
      : of_(of), rank_(rank), expectation_(of.run.checkpoint, alive(of, rank)) {}
  DiscardSink::Inspect inspect() {
    if (of_.flags.check.empty()) return {};
    return [this](uint32_t buffer, int64_t at, std::span<const std::byte> elements) {
      const std::lock_guard lock(mutex_);
      check_elements(of_.plan, rank_, buffer, at, elements, expectation_);
    };
  }

 private:
  const RankRun& of_;
  const int rank_;
  std::mutex mutex_;
  Expectation expectation_;
};

// One rank's life.
void be_rank(const RankRun& of, int rank) {
  RankOutcome outcome{.rank = rank, .pid = static_cast<int32_t>(getpid())};
  reset_peak_rss();
  outcome.baseline_bytes = read_process_memory().held();
  Ledger ledger(of.plan.promise.ledger_limit_bytes(rank));
  const std::unique_ptr<Exchange> exchange = of.rings.end_of(rank, of.board);
  DropCheck dropped(of, rank);
  std::unique_ptr<HostSink> host;
  std::unique_ptr<DiscardSink> discard;
  if (of.run.options.destination == Destination::cpu) {
    host = std::make_unique<HostSink>(of.plan, rank, ledger);
    if (!of.flags.check.empty()) host->poison([&of] { of.board.check(); });
  } else {
    discard = std::make_unique<DiscardSink>(of.plan, rank, dropped.inspect());
  }
  Sink& sink = host ? static_cast<Sink&>(*host) : *discard;
  const LoadOutcome loaded = load(of.run.checkpoint, of.plan, {rank, &of.board, exchange.get()},
                                  sink, ledger, {.threads = of.threads});
  outcome.loaded_ns = of.clock.now_ns();
  std::optional<Training> training;  // what comes after a load is held, but not done
  if (of.run.optimizer) training.emplace(of.run, of.plan, rank, *host, ledger, of.threads);
  of.board.barrier(rank);  // all hold their shards until the last has finished
  outcome.kernel_peak_bytes = read_process_memory().peak_held();
  outcome.ledger_peak_bytes = ledger.peak_bytes();
  note(outcome, loaded);
  of.board.barrier(rank);  // and until all have looked at what they share
  if (host) check_and_dump(of, rank, *host, outcome);
  if (discard) outcome.digest = discard->digest();
  of.board.post(rank, std::as_bytes(std::span(&outcome, 1)));
  of.board.barrier(rank);
}

void refuse_contradictions(const LoadFlags& flags) {
  if (!flags.check.empty() && flags.check != "values") {
    fail(Category::usage, fmt::format("unknown check '{}'; values", printable(flags.check)));
  }
  const std::string& digest = flags.expect_digest;
  if (!digest.empty() &&
      (digest.size() != 16 || digest.find_first_not_of("0123456789abcdef") != std::string::npos)) {
    fail(Category::usage, "--expect-digest takes what --digest prints",
         {.expected = "16 hex digits", .got = printable(digest)});
  }
  if (flags.run.destination == "discard" && !flags.dump.empty()) {
    fail(Category::usage, "--dump needs what --destination discard drops");
  }
}

LoadReport report_of(const RankRun& of, const std::optional<Budget>& budget, int64_t begin_ns,
                     uint64_t launcher_bytes) {
  LoadReport report{.checkpoint = facts_of(of.run.checkpoint),
                    .strategy = of.plan.strategy().name,
                    .promise = of.plan.promise,
                    .launcher_bytes = launcher_bytes,
                    .checked = !of.flags.check.empty(),
                    .budget = budget};
  int64_t end_ns = begin_ns;
  int64_t check_ns = 0;
  uint64_t digest = 0;
  for (int rank = 0; rank < of.plan.ranks(); ++rank) {
    const auto outcome = posted<RankOutcome>(of.board, rank);
    end_ns = std::max(end_ns, outcome.loaded_ns);
    check_ns = std::max(check_ns, outcome.check_ns);
    digest += outcome.digest;
    report.ranks.push_back(outcome);
  }
  report.elapsed_s = static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  report.check_s = static_cast<double>(check_ns) / kNsPerSecond;
  if (of.flags.digest) report.digest = digest;
  return report;
}

LoadReport load_with_ranks(const LoadFlags& flags, FileSystem& files, SteadyClock& clock) {
  require_cores(flags.common, flags.run.ranks);
  const Run run = open_run(files, flags.run);
  const auto budget = budget_in_force(flags.common, nodes_of(flags.run));
  const Plan plan = plan_run(run, *run.options.strategy, budget);
  if (budget) require_fits(plan.promise, *budget);

  SharedBoard board(plan.ranks(), clock);
  Rings rings(plan);
  const int threads = threads_per_rank(flags.common, plan.ranks());
  const RankRun of{flags, run, plan, clock, board, rings, threads};
  // Ranks that take whole tensors take all of them.
  const uint64_t times = plan.strategy().of_reader == Window::none ? 1 : flags.run.ranks;
  Progress progress(flags.common, saturating_mul(run.checkpoint.manifest.data_bytes(), times),
                    clock);
  const StopSignals stop;  // the directory below is to be removed before this process ends
  DumpDirectory dump(flags, files);
  const int64_t begin_ns = clock.now_ns();
  run_ranks(
      board, clock, [&of](int rank) { be_rank(of, rank); }, watching(board, progress));
  dump.finish();
  return report_of(of, budget, begin_ns, read_process_memory().held());
}

void require_digest(const LoadFlags& flags, const LoadReport& report) {
  if (flags.expect_digest.empty()) return;
  const std::string found = digest_text(report.digest.value());
  if (found == flags.expect_digest) return;
  fail(Category::integrity, "the digest of what was loaded is not the expected one",
       {.expected = flags.expect_digest, .got = found});
}

}  // namespace

int run_load(const Args& args) {
  CLI::App app("load into real rank processes; prints what was promised beside what happened",
               "modicum load");
  LoadFlags flags;
  add_common_flags(app, flags.common);
  add_run_flags(app, flags.run);
  add_oversubscribe_flag(app, flags.common);
  app.add_option("--check", flags.check,
                 "values: poison the destination first, then compare every value");
  app.add_flag("--digest", flags.digest, "one number over names, dtypes, shapes and values");
  app.add_option("--expect-digest", flags.expect_digest,
                 "fail (12) where the digest is not this one of 16 hex digits");
  app.add_option("--dump", flags.dump, "a new directory: each rank writes its shards there");
  if (const auto done = parse(app, args)) return *done;
  refuse_contradictions(flags);
  flags.digest = flags.digest || !flags.expect_digest.empty();
  PosixFileSystem files;
  SteadyClock clock;
  const LoadReport report = load_with_ranks(flags, files, clock);
  require_digest(flags, report);
  print_result(
      flags.common, [&] { return load_json(report); }, [&] { return load_text(report); });
  return 0;
}

}  // namespace modicum
