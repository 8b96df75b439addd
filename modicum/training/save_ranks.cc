#include "modicum/training/save_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "modicum/training/trained_job.h"

namespace modicum {
namespace {

// The parts of a life, with the promise of each.
PhaseReport phase_of(const TrainedJob& job, const JobOutcome& outcome, std::string name, Part part,
                     std::initializer_list<LifePart> life_parts) {
  PhaseReport phase{std::move(name), part_of(job.load.plan.promise, part), {}};
  for (const RankLife& life : outcome.ranks) phase.ranks.push_back(life.highest(life_parts));
  return phase;
}

void add_saved(const SaveTask& task, const JobOutcome& outcome, SaveReport& report) {
  const SavedCheckpoint& saved = *outcome.saved;
  report.step = saved.step;
  report.path = saved.path;
  report.is_durable = saved.is_durable;
  report.written_bytes = saved.written_bytes;
  for (const std::string& warning : saved.warnings) report.checkpoint.warnings.push_back(warning);
  if (outcome.damaged) report.damaged.push_back(*outcome.damaged);
  for (const uint32_t stored : task.plan.form().left_out) {
    report.left_out.push_back(task.load.run.checkpoint.manifest.tensors[stored].spec.fqn);
  }
  for (const SavePlan::CopiedTensor& copied : task.plan.copied()) {
    report.copied.push_back(task.plan.manifest().tensors[copied.to].spec.fqn);
  }
  for (const CheckpointFile& file : saved.record.files)
    report.files.push_back({file.name, file.bytes});
}

}  // namespace

SaveNeeds save_needs_of(const Run& run, const SaveForm& form) {
  const Plan loaded = plan_run(run, *run.options.strategy, std::nullopt);
  return SavePlan(run.checkpoint, loaded, form).needs();
}

Footprint save_footprint_of(const SaveNeeds& model, const StateFiles* state) {
  std::vector<SaveNeeds> parts = {model};
  if (state != nullptr) parts.push_back({state->footprint()});
  Footprint result = save_footprint(parts);
  result[Purpose::staging] = 0;  // that of the load, which may be shrunk to fit the budget
  return result;
}

SaveReport save_in_ranks(const SaveTask& task, ShowBytes show) {
  const TrainedJob job{.load = task.load,
                       .trains = task.state != nullptr,
                       .from = task.from,
                       .seed = task.seed,
                       .steps = task.steps,
                       .save = &task};
  const JobOutcome outcome = run_job(job, show);
  SaveReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .launcher = outcome.launcher,
                    .cgroup_peak_bytes = outcome.cgroup_peak_bytes,
                    .is_preempted = outcome.is_preempted,
                    .compared = outcome.compared};
  add_saved(task, outcome, report);
  int64_t begin_ns = INT64_MAX, end_ns = 0;
  for (const RankLife& life : outcome.ranks) {
    report.ranks.push_back(life.highest({kLoadPart, kFirstStepPart, kStepsPart, kSavePart}));
    report.digest += life.model_digest;
    if (job.trains) report.state_digest = report.state_digest.value_or(0) + life.saved_digest;
    report.written_bytes += life.save.written_bytes;
    report.read_bytes += life.save.read_bytes;
    report.gathered_bytes += life.save.gathered_bytes;
    begin_ns = std::min(begin_ns, life.save_begin_ns);
    end_ns = std::max(end_ns, life.save_end_ns);
  }
  report.elapsed_s = static_cast<double>(end_ns - begin_ns) / kNsPerSecond;
  report.durable_s = static_cast<double>(outcome.saved->durable_ns - begin_ns) / kNsPerSecond;
  return report;
}

ResumeState::ResumeState(FileSystem& opened, const RunCheckpoint& resumed)
    : checkpoint(open_checkpoint(opened, join_path(resumed.path, kStateDirectory))),
      files(checkpoint.manifest),
      facts(parse_state(read_text(*opened.open(join_path(checkpoint.directory, kStateFile)),
                                  kLongestText, Category::integrity))),
      carried(resumed, checkpoint.manifest) {}

Footprint ResumeState::footprint(const Run& run) const {
  const std::vector<StateOf> parameters = state_of(run);
  files.require_of(parameters);
  return resume_footprint_of(checkpoint.manifest, files, parameters);
}

LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show) {
  const TrainedJob job{.load = task.load,
                       .trains = task.state != nullptr,
                       .from = task.state,
                       .seed = task.state != nullptr ? task.state->facts.seed : 0,
                       .max_norm = task.max_norm,
                       .steps = task.steps};
  const JobOutcome outcome = run_job(job, show);
  LoadReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .full_per_rank = full_per_rank_promise(task.load.plan),
                    .launcher = outcome.launcher,
                    .cgroup_peak_bytes = outcome.cgroup_peak_bytes,
                    .elapsed_s = outcome.load_s,
                    .digest = 0,
                    .compared = outcome.compared};
  for (const RankLife& life : outcome.ranks) {
    report.ranks.push_back(life.highest({kLoadPart, kFirstStepPart, kStepsPart}));
    *report.digest += life.model_digest;
    if (job.trains) report.state_digest = report.state_digest.value_or(0) + life.state_digest;
  }
  if (job.trains) {
    report.phases = {
        phase_of(job, outcome, "resume", Part::resume, {kLoadPart}),
        phase_of(job, outcome, "step_resumed", Part::step, {kStepsPart, kFirstStepPart})};
  }
  return report;
}

RehearseReport rehearse_in_ranks(const RehearsalTask& task, ShowBytes show) {
  const TrainedJob job{.load = task.load,
                       .trains = true,
                       .seed = task.seed,
                       .max_norm = task.max_norm,
                       .steps = task.steps,
                       .save = task.save,
                       .steps_after = task.save != nullptr ? 1 : 0};
  const JobOutcome outcome = run_job(job, show);
  RehearseReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                        .strategy = task.load.plan.strategy().name,
                        .format = *task.load.run.optimizer,
                        .promised_bytes = task.load.plan.promise.node_peaks(),
                        .launcher = outcome.launcher,
                        .cgroup_peak_bytes = outcome.cgroup_peak_bytes,
                        .steps = task.steps,
                        .seed = task.seed,
                        .load_s = outcome.load_s,
                        .elapsed_s = outcome.ranks_s,
                        .max_norm = task.max_norm};
  report.phases = {phase_of(job, outcome, "load", Part::load, {kLoadPart}),
                   phase_of(job, outcome, "step_1", Part::step, {kFirstStepPart})};
  if (task.steps > 1) {
    report.phases.push_back(
        phase_of(job, outcome, fmt::format("step_{}", task.steps), Part::step, {kStepsPart}));
  }
  uint64_t written_bytes = 0;
  for (const RankLife& life : outcome.ranks) {
    report.state_digest += life.state_digest;
    report.model_digest += life.model_digest;
    if (life.norm.finite) report.grad_norm = life.norm.norm();
    written_bytes += life.save.written_bytes;
  }
  if (!outcome.saved) return report;
  report.phases.push_back(phase_of(job, outcome, "save", Part::save, {kSavePart}));
  const SavedCheckpoint& saved = *outcome.saved;
  report.saved = {saved.step, saved.path, saved.written_bytes + written_bytes};
  for (const std::string& warning : saved.warnings) report.checkpoint.warnings.push_back(warning);
  return report;
}

}  // namespace modicum
