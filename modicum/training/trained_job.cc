#include "modicum/training/trained_job.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "modicum/training/save_grace.h"
#include "modicum/training/saving_rank.h"
#include "modicum/training/trained_rank.h"

namespace modicum {
namespace {

uint64_t bytes_to_save(const SaveTask& task) {
  const uint64_t state = task.state != nullptr ? task.state->manifest().data_bytes() : 0;
  return task.plan.manifest().data_bytes() + state;
}

struct JobWorld : LoadWorld {
  JobWorld(const TrainedJob& trained_job, const CheckpointSave* saving)
      : LoadWorld(trained_job.load), job(trained_job), page(trained_job.load.plan.ranks()) {
    if (trained_job.from != nullptr) {
      of_state.emplace(trained_job.from->checkpoint.manifest, trained_job.load.plan.ranks(),
                       kStateFolder);
    }
    if (saving == nullptr) return;
    place.emplace(*saving, trained_job.save->plan);
    grace.emplace(trained_job.save->grace_ns, bytes_to_save(*trained_job.save), board, clock);
    if (trained_job.save->grace_ns > 0) grace_ns = [this] { return grace->granted_ns(); };
  }

  // What all ranks have compared of the weights and of the state.
  ComparedValues merged() const {
    ComparedValues all = compared.merged();
    if (!of_state) return all;
    const ComparedValues more = of_state->merged();
    all.bytes += more.bytes;
    all.not_compared.insert(all.not_compared.end(), more.not_compared.begin(),
                            more.not_compared.end());
    return all;
  }

  const TrainedJob& job;
  const NormPage page;
  std::optional<ComparedPages> of_state;  // if a state is read
  std::optional<SavePlace> place;         // with a save
  std::optional<SaveGrace> grace;
};

class JobRank {
 public:
  JobRank(JobWorld& world, int rank)
      : world_(world), job_(world.job), rank_(rank), loading_(world, rank) {
    if (world.place) gather_ = world.place->gathers.end_of(rank, world.board);
  }

  RankLife live() {
    RankLoad& load = loading_.load;
    load.load();
    if (job_.from == nullptr) end_load();
    load.book_what_stays();
    if (job_.trains) begin_training();
    if (job_.from != nullptr) end_load();
    take_steps(job_.steps);
    life_.parts[kStepsPart] = loading_.later_phase(world_.board);
    if (job_.save != nullptr) save();
    world_.compared.give(rank_, load.compared());
    take_steps(job_.steps_after);
    const bool is_as_saved = job_.save != nullptr && job_.steps_after == 0;
    life_.state_digest = is_as_saved ? life_.saved_digest : state_digest();
    life_.model_digest =
        digest_of_rank(job_.load.plan, rank_, load.shards(), [&load] { load.beat(); });
    return life_;
  }

 private:
  void end_load() {
    life_.parts[kLoadPart] = loading_.phase_of(loading_.load.outcome(), world_.board);
  }

  void begin_training() {
    trained_.emplace(world_, world_.page, rank_, loading_,
                     TrainedRank::Options{.seed = job_.seed, .max_norm = job_.max_norm});
    if (job_.from == nullptr) return trained_->cast_masters();
    trained_->read_state(*job_.from, *world_.of_state);
    steps_made_ = job_.from->facts.steps;
  }

  void take_steps(int steps) {
    for (int step = 0; step < steps; ++step) {
      trained_->steps().step(++steps_made_);
      life_.norm = trained_->steps().taken().norm;
      if (life_.parts[kFirstStepPart].pid == 0) {
        life_.parts[kFirstStepPart] = loading_.later_phase(world_.board);
      }
    }
  }

  void save() {
    world_.board.barrier(rank_);
    life_.save_begin_ns = world_.clock.now_ns();
    world_.grace->begin(rank_);
    const RankOptimizer* const optimizer = trained_ ? &trained_->optimizer() : nullptr;
    life_.save = save_rank(*job_.save, *world_.place,
                           {rank_, &world_.board, nullptr, &loading_.ledger, gather_.get()},
                           loading_.load, optimizer);
    life_.save_end_ns = world_.clock.now_ns();
    life_.parts[kSavePart] = loading_.later_phase(world_.board);
    if (optimizer == nullptr) return;
    life_.saved_digest = state_digest();
    life_.skipped = trained_->steps().taken().skipped;
  }

  uint64_t state_digest() { return trained_ ? trained_->optimizer().digest().state : 0; }

  JobWorld& world_;
  const TrainedJob& job_;
  const int rank_;
  LoadingRank loading_;
  std::unique_ptr<Gather> gather_;
  std::optional<TrainedRank> trained_;
  int64_t steps_made_ = 0;  // optimizer steps, those of the state included
  RankLife life_;
};

// The launcher may have received a signal since the ranks finished.
void check_stop(const StopSignals& stop, SaveGrace& grace) {
  const auto stopped = stop.received();
  if (!stopped || (stopped->category() == Category::preempted && !grace.is_over())) return;
  throw *stopped;
}

JobOutcome outcome_of(JobWorld& world, ShowBytes show) {
  JobOutcome outcome{.ranks = outcomes_of<JobRank>(world, show)};
  outcome.ranks_s = world.seconds_until(world.clock.now_ns());
  for (const RankLife& life : outcome.ranks) {
    outcome.load_s = std::max(outcome.load_s, world.seconds_until(life.parts[kLoadPart].loaded_ns));
  }
  return outcome;
}

}  // namespace

RankOutcome RankLife::highest(std::initializer_list<LifePart> life_parts) const {
  RankOutcome outcome = parts[*life_parts.begin()];
  for (const LifePart part : life_parts) {
    outcome.ledger_peak_bytes = std::max(outcome.ledger_peak_bytes, parts[part].ledger_peak_bytes);
    outcome.kernel_peak_bytes = std::max(outcome.kernel_peak_bytes, parts[part].kernel_peak_bytes);
  }
  return outcome;
}

namespace {

// `stop`: nullptr if the job saves nothing.
JobOutcome run_job(const TrainedJob& job, ShowBytes show, const StopSignals* stop) {
  std::optional<CheckpointSave> saving;
  if (const SaveTask* const save = job.save) {
    saving.emplace(*job.load.run.files, save->root, save->step, save->state != nullptr, save->keep);
  }
  JobWorld world(job, saving ? &*saving : nullptr);
  JobOutcome outcome = outcome_of(world, show);
  if (stop != nullptr) check_stop(*stop, *world.grace);
  outcome.compared = world.merged();  // an error ends the job before the save is published
  if (saving) {
    TrainedSteps trained{.skipped = outcome.ranks.front().skipped};
    for (const RankLife& life : outcome.ranks) trained.digest += life.saved_digest;
    outcome.saved = publish(*saving, *job.save, trained, [&] { check_stop(*stop, *world.grace); });
    outcome.is_preempted = stop->received().has_value();
  }
  outcome.launcher = world.launcher_memory();
  outcome.cgroup_peak_bytes = world.cgroup_peak.bytes();
  return outcome;
}

}  // namespace

JobOutcome run_job(const TrainedJob& job, ShowBytes show) {
  if (job.save == nullptr) return run_job(job, show, nullptr);
  require_recordable(*job.save);
  const StopSignals stop;  // a stop signal throws, so that the checkpoint in flight is removed
  std::optional<DamagedCheckpoint> damaged = set_damaged_aside(
      *job.load.run.files, job.save->root, job.save->step, [&stop] { stop.check(); });
  try {
    JobOutcome outcome = run_job(job, show, &stop);
    if (damaged) outcome.saved->warnings.push_back(warning_of(*damaged));
    outcome.damaged = std::move(damaged);
    return outcome;
  } catch (const Error& error) {
    if (!damaged) throw;
    throw Error(error.category(),
                fmt::format("{}; {}", error.what_happened(), warning_of(*damaged)), error.facts());
  }
}

}  // namespace modicum
