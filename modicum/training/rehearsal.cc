// The rank processes of `rehearse`: load, steps and save.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "modicum/training/saving_rank.h"
#include "modicum/training/trained_rank.h"

namespace modicum {
namespace {

// The phases are the load, the first step, the later steps, and the save.
constexpr size_t kPhases = 4;

// The outcome of a rank. Plain data, since it is sent from the rank's process.
struct Rehearsed {
  std::array<RankOutcome, kPhases> phases;
  SaveOutcome save;
  StepsTaken taken;
  // This rank's parts of the digests.
  uint64_t saved_digest = 0;
  uint64_t state_digest = 0;
  uint64_t model_digest = 0;
};

struct RehearsalWorld : LoadWorld {
  RehearsalWorld(const RehearsalTask& of, const StepSave* step)
      : LoadWorld(of.load), rehearsal(of), page(of.load.plan.ranks()) {
    if (step != nullptr) place.emplace(*step, of.save->plan);
  }

  const RehearsalTask& rehearsal;
  const NormPage page;
  std::optional<SavePlace> place;  // with a save
};

class RehearsalRank {
 public:
  RehearsalRank(RehearsalWorld& world, int rank)
      : world_(world), task_(world.rehearsal), rank_(rank), loading_(world, rank) {
    if (world.place) gather_ = world.place->gathers.end_of(rank, world.board);
  }

  Rehearsed live() {
    loading_.load.load();
    world_.compared.give(rank_, loading_.load.compared());
    outcome_.phases[0] = loading_.phase_of(loading_.load.outcome(), world_.board);
    loading_.load.book_what_stays();
    take_steps();
    outcome_.model_digest = digest_of_rank(task_.load.plan, rank_, loading_.load.shards(),
                                           [this] { loading_.load.beat(); });
    return outcome_;
  }

 private:
  void take_steps() {
    TrainedRank trained(world_, world_.page, rank_, loading_,
                        {.seed = task_.seed, .max_norm = task_.max_norm});
    trained.cast_masters();
    for (int step = 1; step <= task_.steps; ++step) {
      trained.steps().step(step);
      if (step == 1) outcome_.phases[1] = loading_.later_phase(world_.board);
    }
    outcome_.phases[2] = loading_.later_phase(world_.board);
    int last = task_.steps;
    if (task_.save != nullptr) {
      save(trained.optimizer());
      trained.steps().step(++last);
    }
    outcome_.taken = trained.steps().finish(last);
    outcome_.state_digest = trained.optimizer().digest().state;
  }

  void save(const RankOptimizer& optimizer) {
    outcome_.save = save_rank(*task_.save, *world_.place,
                              {rank_, &world_.board, nullptr, &loading_.ledger, gather_.get()},
                              loading_.load, &optimizer);
    outcome_.phases[3] = loading_.later_phase(world_.board);
    outcome_.saved_digest = optimizer.digest().state;
  }

  RehearsalWorld& world_;
  const RehearsalTask& task_;
  const int rank_;
  LoadingRank loading_;
  std::unique_ptr<Gather> gather_;
  Rehearsed outcome_;
};

std::vector<PhaseReport> phases_of(const RehearsalTask& task,
                                   const std::vector<Rehearsed>& outcomes) {
  const Promise& promise = task.load.plan.promise;
  const auto phase = [&](std::string name, Part part, size_t number) {
    PhaseReport of{std::move(name), part_of(promise, part), {}};
    for (const Rehearsed& outcome : outcomes) of.ranks.push_back(outcome.phases[number]);
    return of;
  };
  std::vector<PhaseReport> phases = {phase("load", Part::load, 0), phase("step_1", Part::step, 1)};
  if (task.steps > 1) phases.push_back(phase(fmt::format("step_{}", task.steps), Part::step, 2));
  if (task.save != nullptr) phases.push_back(phase("save", Part::save, 3));
  return phases;
}

}  // namespace

RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show) {
  if (task.save != nullptr) require_recordable(*task.save);
  const StopSignals stop;  // a stop signal throws, so that the step in flight is removed
  std::optional<StepSave> step;
  std::optional<DamagedStep> damaged;
  if (task.save != nullptr) {
    FileSystem& files = *task.load.run.files;
    damaged = set_damaged_aside(files, task.save->root, task.save->step, [&stop] { stop.check(); });
    step.emplace(files, task.save->root, task.save->step, true);
  }
  RehearsalWorld world(task, step ? &*step : nullptr);
  const std::vector<Rehearsed> outcomes = outcomes_of<RehearsalRank>(world, show);
  world.compared.merged();  // an error ends the rehearsal before the save is published
  RehearseReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                        .strategy = task.load.plan.strategy().name,
                        .format = *task.load.run.optimizer,
                        .promised_bytes = task.load.plan.promise.node_peaks(),
                        .phases = phases_of(task, outcomes),
                        .launcher_bytes = read_process_memory().held(),
                        .steps = task.steps,
                        .seed = task.seed,
                        .elapsed_s = world.seconds_until(world.clock.now_ns()),
                        .max_norm = task.max_norm};
  uint64_t written_bytes = 0;
  TrainedSteps trained{.skipped = outcomes.front().taken.skipped};
  for (const Rehearsed& outcome : outcomes) {
    trained.digest += outcome.saved_digest;
    report.load_s = std::max(report.load_s, world.seconds_until(outcome.phases[0].loaded_ns));
    report.state_digest += outcome.state_digest;
    report.model_digest += outcome.model_digest;
    written_bytes += outcome.save.written_bytes;
    if (outcome.taken.norm.finite) report.grad_norm = outcome.taken.norm.norm();
  }
  if (!step) return report;
  SavedStep saved = publish(*step, *task.save, trained, [&] { stop.check(); });
  report.saved = {saved.step, saved.path, saved.written_bytes + written_bytes};
  for (const std::string& warning : saved.warnings) report.checkpoint.warnings.push_back(warning);
  if (damaged) report.checkpoint.warnings.push_back(warning_of(*damaged));
  return report;
}

}  // namespace modicum
