#include <fmt/format.h>
#include <fmt/ranges.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"
#include "modicum/report/report.h"

namespace modicum {
namespace {

// Formats a rate with three digits and a power of 1000: "3.42 G". The caller appends the unit.
std::string rate(double per_second) {
  constexpr std::string_view kPrefixes = "kMG";
  std::string prefix;
  for (const char next : kPrefixes) {
    if (per_second < 1000) break;
    per_second /= 1000;
    prefix = next;
  }
  return fmt::format("{:.3g} {}", per_second, prefix);
}

}  // namespace

double StepReport::params_per_s() const noexcept {
  return step_s > 0 ? static_cast<double>(task.params) / step_s : 0;
}

std::string step_json(const StepReport& report) {
  JsonWriter out;
  out.begin_object().member("state_format", row_of(report.task.format).name);
  out.member("params", report.task.params).member("ranks", report.promise.ranks());
  out.member("threads", report.task.threads).member("steps", report.task.steps);
  out.member("skipped_steps", report.skipped_steps).member("seed", report.task.seed);
  out.member("grad_dtype", torch_name(report.task.grad_dtype));
  out.member("isa", report.isa).key("isas_not_run").begin_array();
  for (const std::string& isa : report.isas_not_run) out.value(isa);
  out.end_array().member("fork_children", report.task.children);
  out.member("promised_bytes", report.promise.node_peak_bytes(0));
  budget_member(out, report.budget);
  out.key("held_bytes_per_param").begin_object();
  for (const auto& [step, held_bytes] :
       {std::pair("step_1", report.step_1), {"last_step", report.last_step}}) {
    out.key(step)
        .begin_object()
        .member("ledger", held_bytes.ledger)
        .member("kernel", held_bytes.kernel);
    out.end_object();
  }
  out.end_object().member("fixed_bytes", report.fixed_bytes);
  out.member("bytes_per_param_moved", report.bytes_per_param_moved);
  out.member("step_s", report.step_s).member("params_per_s", report.params_per_s());
  out.member("bytes_per_s", report.bytes_per_s());
  out.member("copy_bytes_per_s", report.copy_bytes_per_s);
  out.member("speedup_vs_unfused", report.speedup_vs_unfused);
  out.member("grad_norm", report.grad_norm).member("max_norm", report.task.max_norm);
  out.member("loss_scale", report.loss_scale);
  out.member("state_digest", digest_text(report.state_digest));
  out.member("master_digest", digest_text(report.master_digest));
  return out.end_object().text();
}

std::string step_text(const StepReport& report) {
  const auto number = [](int count, std::string_view noun) {
    return counted(static_cast<uint64_t>(count), noun);
  };
  std::string text =
      fmt::format("{}: {} parameters on {} of {}, {}, {} gradients\n\n",
                  row_of(report.task.format).name, rate(static_cast<double>(report.task.params)),
                  number(report.promise.ranks(), "rank"), number(report.task.threads, "thread"),
                  number(report.task.steps, "step"), torch_name(report.task.grad_dtype));
  const auto line = [&text](std::string_view what, const std::string& first,
                            const std::string& last) {
    text += fmt::format("{:<26} {:>12} {:>12}\n", what, first, last);
  };
  const auto bytes = [](double value) { return fmt::format("{:.4f}", value); };
  line("bytes per parameter", "step 1", "last step");
  line("  charged", bytes(report.step_1.ledger), bytes(report.last_step.ledger));
  line("  measured (tree)", bytes(report.step_1.kernel), bytes(report.last_step.kernel));
  text += fmt::format("fixed {}, predicted {}; forked children per rank: {}\n\n",
                      format_size(report.fixed_bytes),
                      format_size(report.promise.node_peak_bytes(0)), report.task.children);
  if (report.step_s > 0) {
    text += fmt::format("{} params/s, {}B/s at {:.4g} bytes moved per parameter ({})\n",
                        rate(report.params_per_s()), rate(report.bytes_per_s()),
                        report.bytes_per_param_moved, report.isa);
  }
  if (report.copy_bytes_per_s && report.speedup_vs_unfused) {
    text += fmt::format("a copy moves {}B/s; a step is {:.2f} x as fast as five separate passes\n",
                        rate(*report.copy_bytes_per_s), *report.speedup_vs_unfused);
  }
  text += report.grad_norm ? fmt::format("gradient norm {:.6g}", *report.grad_norm)
                           : std::string("gradient not finite");
  if (report.task.max_norm) text += fmt::format(", clipped to {:.6g}", *report.task.max_norm);
  if (report.loss_scale) {
    text += fmt::format("; loss scale {:.6g}, {} skipped", *report.loss_scale,
                        number(report.skipped_steps, "step"));
  }
  text += fmt::format("\nstate digest {}, master digest {}\n", digest_text(report.state_digest),
                      digest_text(report.master_digest));
  if (!report.isas_not_run.empty()) {
    text += fmt::format("not run here: {}\n", fmt::join(report.isas_not_run, ", "));
  }
  return text;
}

}  // namespace modicum
