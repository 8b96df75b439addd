// Parts shared by several reports. Internal to `report`.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/json/json.h"
#include "modicum/report/report.h"

namespace modicum {

// Functions with a JsonWriter write members of an open JSON object.
// Writes the members `checkpoint`, `revision` and `warnings`.
void checkpoint_members(JsonWriter& out, const CheckpointFacts& checkpoint);
// The member `error`, with those facts that the error has.
void error_member(JsonWriter& out, const Error& error);
void revision_member(JsonWriter& out, const std::optional<HubModel>& hub);  // none if not known
std::string name_of(const HubModel& model);                                 // ORG/NAME@REVISION
void warnings_member(JsonWriter& out, std::span<const std::string> warnings);
std::string warnings_text(std::span<const std::string> warnings);  // a line for each
void damaged_member(JsonWriter& out, std::span<const DamagedCheckpoint> damaged);
void state_digest_member(JsonWriter& out, const std::optional<uint64_t>& digest);
// `compared_bytes` and `not_compared`: the values of a checkpoint that were compared with its
// record.
void compared_members(JsonWriter& out, const ComparedValues& compared);
std::string compared_text(const ComparedValues& compared);  // a line; empty without a record
void budget_member(JsonWriter& out, const std::optional<Budget>& budget);
std::string budget_text(const std::optional<Budget>& budget);  // an empty line, then one line

// The promise and the measured memory of all ranks, of a whole run or of one phase.
struct PromiseAndOutcomes {
  const Promise& promise;
  std::span<const RankOutcome> ranks;  // by rank
  LauncherMemory launcher;
  std::optional<uint64_t> cgroup_peak_bytes = std::nullopt;
};
void outcome_members(JsonWriter& out, const PromiseAndOutcomes& outcomes);  // `nodes` and `ranks`
std::string cgroup_text(uint64_t peak_bytes);                               // a line
std::string outcome_text(const PromiseAndOutcomes& outcomes);               // a table
void phases_member(JsonWriter& out, std::span<const PhaseReport> phases,
                   const LauncherMemory& launcher);

// A part of a job, which `plan` reports as one phase.
struct JobPhase {
  std::string_view name;
  Promise promise;
};
std::vector<JobPhase> phases_of(const JobPromise& job);

void timeline_member(JsonWriter& out, const NodeTimeline& timeline);  // the member `rl` of a node
// A table of the requested strategy's fullest node; empty without timelines.
std::string timeline_text(const PlanReport& report);
// The number of the node whose timeline has the highest peak. Requires of.timelines.
int fullest_timeline(const StrategyReport& report);

// What the save or the resume of the requested run needs on its fullest node, whichever is more.
// Requires that the run has a job.
uint64_t job_bytes(const PlanReport& report);
// "the save, or a resume ...: needed X, short by Y". Requires that report.job_fits is false.
std::string job_shortfall(const PlanReport& report);
// Whether the requested run fits the budget, with DeepSpeed and all holders of the node, and
// otherwise runs that would fit: a sentence for each. Without a budget, what the run needs.
std::vector<std::string> answers(const PlanReport& report);
// The sentence as a line, or as several lines of at most 120 columns.
std::string wrapped(std::string_view sentence);
// Whether the report is about DeepSpeed's training, and not about one with Modicum's AdamW.
bool has_only_forecast(const PlanReport& report);
// What processes of torch hold in addition to the default of --baseline, on the fullest node.
std::string baseline_clause(const PlanReport& report);
void alternative_object(JsonWriter& out, const Alternative& alternative);
std::string changes_text(const Alternative& alternative);  // its flags and its configuration
// What the forecast of DeepSpeed leaves out, each as a sentence. Requires report.deepspeed.
std::vector<std::string> not_counted(const PlanReport& report);
// The member `from`, and the sentence in it. Both require report.past and report.budget.
void past_run_member(JsonWriter& out, const PlanReport& report);
std::string past_run_sentence(const PlanReport& report);

void deepspeed_member(JsonWriter& out, const PlanReport& report);
std::string deepspeed_text(const DeepSpeedForecast& forecast);
// "DeepSpeed 0.19.8, ZeRO-2, needs 20.80 GiB by init, ..., 25.24 GiB by epoch_2 on a node".
std::string deepspeed_sentence(const DeepSpeedForecast& forecast);
PageTable deepspeed_table(const DeepSpeedForecast& forecast);  // its lines and totals

}  // namespace modicum
