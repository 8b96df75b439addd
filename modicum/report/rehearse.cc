#include <fmt/format.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/report.h"

namespace modicum {

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
  for (const uint64_t peak : report.promise.node_peaks()) out.value(peak);
  out.end_array().key("phases").begin_array();
  for (const RehearseReport::Phase& phase : report.phases) {
    out.begin_object().member("phase", phase.name);
    outcome_members(out, {phase.promise, phase.ranks, report.launcher_bytes});
    out.end_object();
  }
  out.end_array();
  out.member("grad_norm", report.grad_norm).member("max_norm", report.max_norm);
  out.member("model_digest", digest_text(report.model_digest));
  out.member("digest_uninterrupted", digest_text(report.state_digest));
  return out.end_object().text();
}

std::string rehearse_text(const RehearseReport& report) {
  std::string text = fmt::format(
      "{}, then {} step(s) of AdamW ({}); loaded in {:.2f} s, {:.2f} s in all\n", report.strategy,
      report.steps, row_of(report.format).name, report.load_s, report.elapsed_s);
  for (const RehearseReport::Phase& phase : report.phases) {
    text += fmt::format("\n{}\n{}", phase.name,
                        outcome_text({phase.promise, phase.ranks, report.launcher_bytes}));
  }
  text += budget_text(report.budget);
  if (report.grad_norm) text += fmt::format("gradient norm {:.6g}\n", *report.grad_norm);
  text += fmt::format("state digest {}, model digest {}\n", digest_text(report.state_digest),
                      digest_text(report.model_digest));
  return text + warnings_text(report.checkpoint.warnings);
}

}  // namespace modicum
