#include "modicum/training/rank_load.h"

#include <unistd.h>

#include <functional>
#include <utility>

#include "modicum/probe/probe.h"
#include "modicum/runs/runs.h"

namespace modicum {
namespace {

// Returns the plan after all ranks have agreed on its inputs. Called before the sink's memory is
// charged.
const Plan& agreed(const RankLoadTask& task) {
  task.at.ledger->mark();
  task.at.board->agree(task.at.rank, task.plan.inputs);
  return task.plan;
}

// The state of torch's optimizers is loaded like a model.
std::string folder_in_checkpoint(const Checkpoint& checkpoint) {
  return base_name(checkpoint.directory) == kStateDirectory ? kStateFolder : "";
}

ReportedPhase begun(const RankLoadTask& task) {
  const Reporter& reporter = task.at.ledger->reporter();
  reporter.promise(task.plan.promise, task.at.rank);
  return {reporter, "load"};
}

}  // namespace

RankLoad::RankLoad(const RankLoadTask& task, HostSink::CallerMemory caller_memory,
                   HostSink::Copy copy)
    : task_(task),
      phase_(begun(task)),
      outcome_{.rank = task.at.rank, .pid = static_cast<int32_t>(getpid())},
      held_before_(task.at.ledger->footprint().total()),
      shards_(agreed(task), task.at.rank, *task.at.ledger, std::move(caller_memory),
              std::move(copy)),
      compared_(*task.plan.manifest, folder_in_checkpoint(task.checkpoint)) {}

void RankLoad::load() {
  if (task_.check) shards_.poison([this] { task_.at.board->check(); });
  LoadOptions options = task_.options;
  if (compared_.has_record()) options.compared = &compared_;
  static_cast<LoadOutcome&>(outcome_) = naming_phase("load", [&] {
    return modicum::load(task_.checkpoint, task_.plan, task_.at, shards_, options);
  });
  compared_.compare();
  outcome_.loaded_ns = task_.clock.now_ns();
  outcome_.ledger_peak_bytes = task_.at.ledger->peak_since_mark() - held_before_;
  phase_.end();
}

void RankLoad::check_values() {
  const int64_t begin = task_.clock.now_ns();
  Expectation expectation(task_.checkpoint, [this] { beat(); });
  modicum::check_values(task_.plan, task_.at.rank, shards_, expectation, task_.options);
  outcome_.check_ns = task_.clock.now_ns() - begin;
}

void RankLoad::book_what_stays() {
  header_ = task_.at.ledger->adopt(Purpose::header, task_.plan.manifest->held_bytes());
  plan_ = task_.at.ledger->adopt(Purpose::plan, task_.plan.held_bytes());
  ring_ = task_.at.ledger->adopt(Purpose::staging, task_.plan.staging.ring_part_bytes);
}

void RankLoad::beat() const {
  task_.at.board->check();
  task_.at.board->beat(task_.at.rank, 0);
}

void RankLoad::note_peaks() {
  outcome_.kernel_peak_bytes = read_process_memory().peak_held();
  outcome_.ledger_peak_bytes = task_.at.ledger->peak_since_mark() - held_before_;
}

}  // namespace modicum
