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

struct SaveWorld : LoadWorld {
  SaveWorld(const SaveTask& of, const StepSave& step)
      : LoadWorld(of.load),
        save(of),
        page(of.load.plan.ranks()),
        place(step, of.plan),
        grace(of.grace_ns, bytes_to_save(of), board, clock) {
    if (of.grace_ns > 0) grace_ns = [this] { return grace.granted_ns(); };
  }

  const SaveTask& save;
  const NormPage page;
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
                              load.shards(), trained_ ? &trained_->optimizer() : nullptr);
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
    trained_->cast_masters();
    for (int step = 1; step <= task_.steps; ++step) trained_->steps().step(step);
    if (task_.steps > 0) outcome_.taken = trained_->steps().finish(task_.steps);
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
  // This rank's parts of the digests of the compared tensors and of the state, as loaded.
  uint64_t loaded_tensors = 0, loaded_state = 0;
  // This rank's parts of the digests of the model and of the state, after the steps.
  uint64_t model = 0, state = 0;
};

// The stored tensors of a step whose digests are compared with its record: each must be loaded
// completely, once, and in its stored dtype.
class Compared {
 public:
  Compared(const Run& run, const RecordedDigests& recorded)
      : is_compared_(held_whole(run.recipe, run.checkpoint.manifest)) {
    const std::vector<uint32_t>& unused = run.recipe.unused;
    for (uint32_t s = 0; s < is_compared_.size(); ++s) {
      const TensorSpec& spec = run.checkpoint.manifest.tensors[s].spec;
      const auto chunks = recorded.chunks_of(spec);
      is_compared_[s] = is_compared_[s] && chunks;
      if (is_compared_[s]) {
        for (const uint64_t chunk : *chunks) digest_ += chunk;
      } else if (!std::binary_search(unused.begin(), unused.end(), s)) {
        left_out_.push_back(spec.fqn);
      }
    }
  }

  const std::vector<bool>& by_stored() const noexcept { return is_compared_; }
  uint64_t digest() const noexcept { return digest_; }  // sum of their recorded digests
  // Names of tensors that are loaded in part, more than once, or in another dtype.
  const std::vector<std::string>& left_out() const noexcept { return left_out_; }

 private:
  std::vector<bool> is_compared_;
  uint64_t digest_ = 0;
  std::vector<std::string> left_out_;
};

struct ResumeWorld : LoadWorld {
  explicit ResumeWorld(const ResumeTask& of)
      : LoadWorld(of.load),
        resume(of),
        page(of.load.plan.ranks()),
        compared(of.load.run, of.step.tensors) {}

  const ResumeTask& resume;
  const NormPage page;
  const Compared compared;
};

class ResumeRank {
 public:
  ResumeRank(ResumeWorld& world, int rank)
      : world_(world), task_(world.resume), rank_(rank), loading_(world, rank) {
    if (const auto& held = task_.load.run.options.resume) {
      header_ = loading_.ledger.adopt(Purpose::header, (*held)[Purpose::header]);
    }
  }

  Resumed live() {
    RankLoad& load = loading_.load;
    load.load();
    load.book_what_stays();
    if (task_.state != nullptr) read_state(*task_.state);
    outcome_.resume = loading_.phase_of(load.outcome(), world_.board);
    outcome_.loaded_tensors =
        stored_digest_of_rank(world_.task.plan, rank_, load.shards(), world_.compared.by_stored(),
                              [&load] { load.beat(); });
    outcome_.loaded_state = state_digest();
    for (int i = 1; i <= task_.steps; ++i) trained_->steps().step(task_.state->facts.steps + i);
    outcome_.step = loading_.later_phase(world_.board);
    outcome_.model =
        digest_of_rank(world_.task.plan, rank_, load.shards(), [&load] { load.beat(); });
    outcome_.state = task_.steps > 0 ? state_digest() : outcome_.loaded_state;
    return outcome_;
  }

 private:
  void read_state(const ResumeState& from) {
    const ReportedPhase phase(loading_.ledger.reporter(), "resume");
    trained_.emplace(world_, world_.page, rank_, loading_,
                     TrainedRank::Options{.seed = from.facts.seed, .max_norm = task_.max_norm});
    const RankOptimizer& optimizer = trained_->optimizer();
    const auto spans = [&](FunctionRef<void(const StoredSpan&)> fn) {
      from.files.for_each_span(optimizer, false, fn);
    };
    loading_.load.outcome().storage_read_bytes +=
        load_spans(from.checkpoint, spans, {rank_, &world_.board, nullptr, &loading_.ledger});
    optimizer.for_each_state([&](AdamW& state) {
      for (size_t shard = 0; shard < state.shards(); ++shard) {
        state.set_steps(shard, from.facts.steps_made_by(state.shard(shard).fqn));
      }
    });
  }

  uint64_t state_digest() { return trained_ ? trained_->optimizer().digest().state : 0; }

  ResumeWorld& world_;
  const ResumeTask& task_;
  const int rank_;
  LoadingRank loading_;
  Charge header_;  // what the launcher holds of the step until it ends
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

// Reads the step again to find the tensor that has changed: the sums of the ranks' digests show
// only that some tensor has changed.
[[noreturn]] void fail_values(const ResumeTask& task) {
  const Verified verified = verify_step(*task.load.run.files, task.step.found.path, [] {});
  if (const Error* const fault = verified.first_fault()) throw *fault;
  fail(Category::integrity, "the loaded values are not those that were saved",
       {.file = base_name(task.step.found.path)});
}

void check_values(const ResumeWorld& world, const std::vector<Resumed>& outcomes,
                  std::vector<std::string>& warnings) {
  const ResumeTask& task = world.resume;
  uint64_t tensors = 0, state = 0;
  for (const Resumed& of : outcomes) {
    tensors += of.loaded_tensors;
    state += of.loaded_state;
  }
  if (const auto& left_out = world.compared.left_out(); !left_out.empty()) {
    warnings.push_back(fmt::format(
        "the values of {} stored tensor(s) were not compared with the record of the step, since "
        "they are loaded in another form: `modicum verify` compares them; the first is {}",
        left_out.size(), printable(left_out.front())));
  }
  const bool is_model = tensors == world.compared.digest();
  const bool is_state =
      task.state == nullptr || !task.state->facts.digest || *task.state->facts.digest == state;
  if (!is_model || !is_state) fail_values(task);
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
  Footprint held = SavePlan(run.checkpoint, loaded, form).footprint();
  if (state != nullptr) held += state->footprint();
  return held;
}

SaveReport save_in_ranks(const SaveTask& task, ShowBytes show) {
  require_recordable(task);
  const StopSignals stop;  // a stop signal throws, so that the step in flight is removed
  StepSave step(*task.load.run.files, task.root, task.step, task.state != nullptr);
  SaveWorld world(task, step);
  const std::vector<Saved> outcomes = outcomes_of<SaveRank>(world, show);
  check_stop(stop, world.grace);
  TrainedSteps trained{.skipped = outcomes.front().taken.skipped};
  for (const Saved& of : outcomes) trained.digest += of.state_digest;
  SavedStep saved = publish(step, task, trained);
  const int64_t durable_ns = world.clock.now_ns();
  const bool is_preempted = stop.received().has_value();
  if (task.keep) step.keep_newest(*task.keep, saved);
  SaveReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .launcher_bytes = read_process_memory().held(),
                    .cgroup_peak_bytes = world.cgroup_peak.bytes(),
                    .step = saved.step,
                    .is_preempted = is_preempted,
                    .path = saved.path,
                    .written_bytes = saved.written_bytes};
  for (const std::string& warning : saved.warnings) report.checkpoint.warnings.push_back(warning);
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
  report.durable_s = static_cast<double>(durable_ns - begin_ns) / kNsPerSecond;
  return report;
}

Footprint resume_footprint_of(const Manifest& weights, const StateFiles& state) {
  Footprint held;
  held[Purpose::header] = state.footprint()[Purpose::header];
  held[Purpose::header] += state.manifest().held_bytes();  // ResumeState::checkpoint
  for (const Manifest* const of : {&weights, &state.manifest()}) {
    held[Purpose::header] += RecordedDigests::held_bytes(*of);
  }
  return held;
}

ResumeState::ResumeState(FileSystem& opened, const FoundStep& step)
    : checkpoint(open_checkpoint(opened, join_path(step.path, kStateDirectory))),
      files(checkpoint.manifest),
      facts(parse_state(read_text(*opened.open(join_path(checkpoint.directory, kStateFile)),
                                  kLongestText, Category::integrity))) {}

LoadReport resume_in_ranks(const ResumeTask& task, ShowBytes show) {
  ResumeWorld world(task);
  const std::vector<Resumed> outcomes = outcomes_of<ResumeRank>(world, show);
  LoadReport report{.checkpoint = facts_of(task.load.run.checkpoint),
                    .strategy = task.load.plan.strategy().name,
                    .promise = task.load.plan.promise,
                    .launcher_bytes = read_process_memory().held(),
                    .cgroup_peak_bytes = world.cgroup_peak.bytes(),
                    .digest = 0};
  check_values(world, outcomes, report.checkpoint.warnings);
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
