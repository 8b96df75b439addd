#include "modicum/training/save_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/training/save_grace.h"
#include "modicum/training/saving_rank.h"
#include "modicum/training/trained_rank.h"

namespace modicum {
namespace {

// The outcome of a rank. Plain data, since it is sent from the rank's process.
struct Saved {
  RankOutcome load;  // its peaks cover both load and save
  SaveOutcome save;
  StepsTaken taken;
  uint64_t state_digest = 0;  // this rank's part
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

uint64_t bytes_to_save(const SaveTask& task) {
  const uint64_t state = task.state != nullptr ? task.state->manifest().data_bytes() : 0;
  return task.plan.manifest().data_bytes() + state;
}

// The pages for the comparison of a state; none if there is no state to read.
std::optional<ComparedPages> pages_of(const ResumeState* from, const LoadTask& load) {
  if (from == nullptr) return {};
  return ComparedPages(from->checkpoint.manifest, load.plan.ranks(), kStateFolder);
}

// The comparisons of the weights and of the state.
ComparedValues merged(const ComparedPages& weights, const std::optional<ComparedPages>& state) {
  ComparedValues all = weights.merged();
  if (!state) return all;
  const ComparedValues more = state->merged();
  all.bytes += more.bytes;
  all.not_compared.insert(all.not_compared.end(), more.not_compared.begin(),
                          more.not_compared.end());
  return all;
}

struct SaveWorld : LoadWorld {
  SaveWorld(const SaveTask& of, const StepSave& step)
      : LoadWorld(of.load),
        save(of),
        page(of.load.plan.ranks()),
        of_state(pages_of(of.from, of.load)),
        place(step, of.plan),
        grace(of.grace_ns, bytes_to_save(of), board, clock) {
    if (of.grace_ns > 0) grace_ns = [this] { return grace.granted_ns(); };
  }

  const SaveTask& save;
  const NormPage page;
  const std::optional<ComparedPages> of_state;
  SavePlace place;
  SaveGrace grace;
};

class SaveRank {
 public:
  SaveRank(SaveWorld& world, int rank)
      : world_(world),
        task_(world.save),
        rank_(rank),
        loading_(world, rank),
        gather_(world.place.gathers.end_of(rank, world.board)) {}

  Saved live() {
    RankLoad& load = loading_.load;
    load.load();
    load.book_what_stays();
    if (task_.state != nullptr) train();
    world_.board.barrier(rank_);
    outcome_.begin_ns = world_.clock.now_ns();
    world_.grace.begin(rank_);
    outcome_.save = save_rank(task_, world_.place,
                              {rank_, &world_.board, nullptr, &loading_.ledger, gather_.get()},
                              load, trained_ ? &trained_->optimizer() : nullptr);
    world_.compared.give(rank_, load.compared());
    outcome_.end_ns = world_.clock.now_ns();
    world_.board.barrier(rank_);
    load.note_peaks();
    world_.board.barrier(rank_);  // shared pages stay mapped until all have read their peaks
    outcome_.load = load.outcome();
    outcome_.load.digest =
        digest_of_rank(world_.save.load.plan, rank_, load.shards(), [&load] { load.beat(); });
    return outcome_;
  }

 private:
  void train() {
    trained_.emplace(world_, world_.page, rank_, loading_,
                     TrainedRank::Options{.seed = task_.seed});
    int64_t made = 0;
    if (const ResumeState* const from = task_.from) {
      trained_->read_state(*from, *world_.of_state);
      made = from->facts.steps;
    } else {
      trained_->cast_masters();
    }
    for (int step = 1; step <= task_.steps; ++step) trained_->steps().step(made + step);
    if (task_.steps > 0) outcome_.taken = trained_->steps().finish(made + task_.steps);
    outcome_.state_digest = trained_->optimizer().digest().state;
  }

  SaveWorld& world_;
  const SaveTask& task_;
  const int rank_;
  LoadingRank loading_;
  const std::unique_ptr<Gather> gather_;
  std::optional<TrainedRank> trained_;
  Saved outcome_;
};

// The outcome of a resuming rank. Plain data.
struct Resumed {
  // `resume` has the peaks until the state was read, `step` the later peaks.
  RankOutcome resume, step;
  // This rank's parts of the digests of the model and of the state, after the steps.
  uint64_t model = 0, state = 0;
};

struct ResumeWorld : LoadWorld {
  explicit ResumeWorld(const ResumeTask& of)
      : LoadWorld(of.load),
        resume(of),
        page(of.load.plan.ranks()),
        of_state(pages_of(of.state, of.load)) {}

  const ResumeTask& resume;
  const NormPage page;
  const std::optional<ComparedPages> of_state;
};

class ResumeRank {
 public:
  ResumeRank(ResumeWorld& world, int rank)
      : world_(world), task_(world.resume), rank_(rank), loading_(world, rank) {}

  Resumed live() {
    RankLoad& load = loading_.load;
    load.load();
    world_.compared.give(rank_, load.compared());
    load.book_what_stays();
    if (const ResumeState* const from = task_.state) {
      trained_.emplace(world_, world_.page, rank_, loading_,
                       TrainedRank::Options{.seed = from->facts.seed, .max_norm = task_.max_norm});
      trained_->read_state(*from, *world_.of_state);
    }
    outcome_.resume = loading_.phase_of(load.outcome(), world_.board);
    for (int i = 1; i <= task_.steps; ++i) trained_->steps().step(task_.state->facts.steps + i);
    outcome_.step = loading_.later_phase(world_.board);
    outcome_.model =
        digest_of_rank(world_.task.plan, rank_, load.shards(), [&load] { load.beat(); });
    if (trained_) outcome_.state = trained_->optimizer().digest().state;
    return outcome_;
  }

 private:
  ResumeWorld& world_;
  const ResumeTask& task_;
  const int rank_;
  LoadingRank loading_;
  std::optional<TrainedRank> trained_;
  Resumed outcome_;
};

// The outcome of a rank with the higher peak of both phases.
RankOutcome of_both(const Resumed& of) {
  RankOutcome both = of.resume;
  both.ledger_peak_bytes = std::max(both.ledger_peak_bytes, of.step.ledger_peak_bytes);
  both.kernel_peak_bytes = std::max(both.kernel_peak_bytes, of.step.kernel_peak_bytes);
  return both;
}

std::vector<PhaseReport> phases_of(const Promise& promise, const std::vector<Resumed>& outcomes) {
  std::vector<PhaseReport> phases = {{"resume", part_of(promise, Part::resume), {}},
                                     {"step_resumed", part_of(promise, Part::step), {}}};
  for (const Resumed& of : outcomes) {
    phases[0].ranks.push_back(of.resume);
    phases[1].ranks.push_back(of.step);
  }
  return phases;
}

// The launcher may have received a signal since the ranks finished.
void check_stop(const StopSignals& stop, SaveGrace& grace) {
  const auto stopped = stop.received();
  if (!stopped || (stopped->category() == Category::preempted && !grace.is_over())) return;
  throw *stopped;
}

}  // namespace

Footprint save_footprint_of(const Run& run, const SaveForm& form, const StateFiles* state) {
  const Plan loaded = plan_run(run, *run.options.strategy, std::nullopt);
  std::vector<SaveNeeds> parts = {SavePlan(run.checkpoint, loaded, form).needs()};
  if (state != nullptr) parts.push_back({state->footprint()});
  Footprint held = save_footprint(parts);
  held[Purpose::staging] = 0;  // that of the load, which may be shrunk to fit the budget
  return held;
}

SaveReport save_in_ranks(const SaveTask& task, ShowBytes show) {
  require_recordable(task);
  const StopSignals stop;  // a stop signal throws, so that the step in flight is removed
  FileSystem& files = *task.load.run.files;
  const auto damaged = set_damaged_aside(files, task.root, task.step, [&stop] { stop.check(); });
  StepSave step(files, task.root, task.step, task.state != nullptr, task.keep);
  SaveWorld world(task, step);
  const std::vector<Saved> outcomes = outcomes_of<SaveRank>(world, show);
  check_stop(stop, world.grace);
  ComparedValues compared = merged(world.compared, world.of_state);
  TrainedSteps trained{.skipped = outcomes.front().taken.skipped};
  for (const Saved& of : outcomes) trained.digest += of.state_digest;
  const SavedStep saved = publish(step, task, trained, [&] { check_stop(stop, world.grace); });
  const bool is_preempted = stop.received().has_value();
  SaveReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .launcher_bytes = read_process_memory().held(),
                    .cgroup_peak_bytes = world.cgroup_peak.bytes(),
                    .step = saved.step,
                    .is_preempted = is_preempted,
                    .path = saved.path,
                    .is_durable = saved.is_durable,
                    .written_bytes = saved.written_bytes,
                    .compared = std::move(compared)};
  for (const std::string& warning : saved.warnings) report.checkpoint.warnings.push_back(warning);
  if (damaged) {
    report.checkpoint.warnings.push_back(warning_of(*damaged));
    report.damaged.push_back(*damaged);
  }
  for (const uint32_t stored : task.plan.form().left_out) {
    report.left_out.push_back(task.load.run.checkpoint.manifest.tensors[stored].spec.fqn);
  }
  for (const SavePlan::Copied& of : task.plan.copied()) {
    report.copied.push_back(task.plan.manifest().tensors[of.to].spec.fqn);
  }
  for (const StepFile& file : saved.record.files) report.files.push_back({file.name, file.bytes});
  int64_t begin_ns = INT64_MAX, end_ns = 0;
  for (const Saved& of : outcomes) {
    report.ranks.push_back(of.load);
    report.digest += of.load.digest;
    report.written_bytes += of.save.written_bytes;
    report.read_bytes += of.save.read_bytes;
    report.gathered_bytes += of.save.gathered_bytes;
    begin_ns = std::min(begin_ns, of.begin_ns);
    end_ns = std::max(end_ns, of.end_ns);
  }
  if (task.state != nullptr) report.state_digest = trained.digest;
  report.elapsed_s = static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  report.durable_s = static_cast<double>(saved.durable_ns - begin_ns) / kNsPerSecond;
  return report;
}

ResumeState::ResumeState(FileSystem& opened, const FoundStep& step)
    : checkpoint(open_checkpoint(opened, join_path(step.path, kStateDirectory))),
      files(checkpoint.manifest),
      facts(parse_state(read_text(*opened.open(join_path(checkpoint.directory, kStateFile)),
                                  kLongestText, Category::integrity))),
      carried(step, checkpoint.manifest) {}

Footprint ResumeState::footprint(const Run& run) const {
  const std::vector<StateOf> parameters = state_of(run);
  files.require_of(parameters);
  return resume_footprint_of(checkpoint.manifest, files, parameters);
}

LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show) {
  ResumeWorld world(task);
  const std::vector<Resumed> outcomes = outcomes_of<ResumeRank>(world, show);
  LoadReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .launcher_bytes = read_process_memory().held(),
                    .cgroup_peak_bytes = world.cgroup_peak.bytes(),
                    .digest = 0};
  report.compared = merged(world.compared, world.of_state);
  for (const Resumed& of : outcomes) {
    report.ranks.push_back(of_both(of));
    report.elapsed_s = std::max(report.elapsed_s, world.seconds_until(of.resume.loaded_ns));
    *report.digest += of.model;
    if (task.state == nullptr) continue;
    report.state_digest = report.state_digest.value_or(0) + of.state;
  }
  if (task.state != nullptr) report.phases = phases_of(report.promise, outcomes);
  return report;
}

}  // namespace modicum
