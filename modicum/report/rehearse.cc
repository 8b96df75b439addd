#include <fmt/format.h>

#include <algorithm>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/report.h"

namespace modicum {

void RehearseReport::add_resumed(const LoadReport& resumed) {
  MODICUM_ASSERT(saved.has_value());
  MODICUM_ASSERT(resumed.state_digest.has_value());
  saved->resume_ranks = static_cast<int>(resumed.ranks.size());
  saved->resumed_digest = *resumed.state_digest;
  phases.insert(phases.end(), resumed.phases.begin(), resumed.phases.end());
  const std::vector<uint64_t> peaks = resumed.promise.node_peaks();
  promised_bytes.resize(std::max(promised_bytes.size(), peaks.size()));
  for (size_t node = 0; node < peaks.size(); ++node) {
    promised_bytes[node] = std::max(promised_bytes[node], peaks[node]);
  }
  launcher.with_ranks = std::max(launcher.with_ranks, resumed.launcher.with_ranks);
  launcher.alone = std::max(launcher.alone, resumed.launcher.alone);
  cgroup_peak_bytes = std::max(cgroup_peak_bytes, resumed.cgroup_peak_bytes);
}

std::string rehearse_json(const RehearseReport& report) {
  JsonWriter out;
  out.begin_object();
  checkpoint_members(out, report.checkpoint);
  out.member("strategy", report.strategy).member("state_format", row_of(report.format).name);
  out.member("steps", report.steps).member("seed", report.seed);
  out.member("elapsed_s", report.elapsed_s).member("load_s", report.load_s);
  out.member("coverage", "proven");
  budget_member(out, report.budget);
  out.key("promised_bytes").begin_array();
  for (const uint64_t peak : report.promised_bytes) out.value(peak);
  out.end_array();
  if (report.cgroup_peak_bytes) out.member("cgroup_peak_bytes", *report.cgroup_peak_bytes);
  phases_member(out, report.phases, report.launcher);
  out.member("grad_norm", report.grad_norm).member("max_norm", report.max_norm);
  out.member("model_digest", digest_text(report.model_digest));
  out.member("digest_uninterrupted", digest_text(report.state_digest));
  if (report.saved) {
    const RehearseReport::SavedCheckpointReport& saved = *report.saved;
    out.member("digest_resumed", digest_text(saved.resumed_digest));
    out.member("resume_ranks", saved.resume_ranks);
    out.key("saved").begin_object().member("step", saved.step).member("path", saved.path);
    out.member("written_bytes", saved.written_bytes).end_object();
  }
  return out.end_object().text();
}

std::string rehearse_text(const RehearseReport& report) {
  std::string text =
      fmt::format("{}, then {} of AdamW ({}); loaded in {:.2f} s, {:.2f} s in all\n",
                  report.strategy, counted(static_cast<uint64_t>(report.steps), "step"),
                  row_of(report.format).name, report.load_s, report.elapsed_s);
  for (const PhaseReport& phase : report.phases) {
    text += fmt::format("\n{}\n{}", phase.name,
                        outcome_text({phase.promise, phase.ranks, report.launcher}));
  }
  if (report.cgroup_peak_bytes) text += '\n' + cgroup_text(*report.cgroup_peak_bytes);
  text += budget_text(report.budget);
  if (report.grad_norm) text += fmt::format("gradient norm {:.6g}\n", *report.grad_norm);
  text += fmt::format("state digest {}, model digest {}\n", digest_text(report.state_digest),
                      digest_text(report.model_digest));
  if (report.saved) {
    text += fmt::format("saved as {} ({}); {} resumed it, and the step has the same state\n",
                        printable(report.saved->path), format_size(report.saved->written_bytes),
                        counted(static_cast<uint64_t>(report.saved->resume_ranks), "rank"));
  }
  return text + warnings_text(report.checkpoint.warnings);
}

}  // namespace modicum
