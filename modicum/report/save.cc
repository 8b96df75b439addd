#include <fmt/format.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {
namespace {

void names_member(JsonWriter& out, std::string_view key, const std::vector<std::string>& names) {
  out.key(key).begin_array();
  for (const std::string& name : names) out.value(name);
  out.end_array();
}

void files_member(JsonWriter& out, const std::vector<SaveReport::File>& files) {
  out.key("files").begin_array();
  for (const SaveReport::File& file : files) {
    out.begin_object().member("name", file.name).member("bytes", file.bytes).end_object();
  }
  out.end_array();
}

// A list has the tensors whose `count` is not 0.
void losses_members(JsonWriter& out, const std::vector<TensorLoss>& losses) {
  int64_t overflowed = 0, underflowed = 0;
  for (const TensorLoss& tensor_loss : losses) {
    overflowed += tensor_loss.loss.overflowed;
    underflowed += tensor_loss.loss.underflowed;
  }
  out.member("overflowed", overflowed).member("underflowed", underflowed);
  out.key("overflowed_tensors").begin_array();
  for (const auto& [tensor, file, loss] : losses) {
    if (loss.overflowed == 0) continue;
    out.begin_object().member("tensor", tensor).member("overflowed", loss.overflowed);
    out.member("underflowed", loss.underflowed).member("first_index", loss.first_index);
    out.member("first_value", loss.first_value).member("largest", loss.largest).end_object();
  }
  out.end_array().key("underflowed_tensors").begin_array();
  for (const auto& [tensor, file, loss] : losses) {
    if (loss.underflowed == 0) continue;
    out.begin_object().member("tensor", tensor).member("underflowed", loss.underflowed);
    out.end_object();
  }
  out.end_array();
}

// `done`: "copied" or "left out".
std::string names_text(std::string_view done, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  return fmt::format("{} {}; the first is {}\n", done, counted(names.size(), "stored tensor"),
                     printable(names.front()));
}

}  // namespace

std::string save_json(const SaveReport& report) {
  JsonWriter out;
  out.begin_object();
  checkpoint_members(out, report.checkpoint);
  out.member("strategy", report.strategy).member("step", report.step);
  out.member("preempted", report.is_preempted);
  out.member("path", report.path).member("written_bytes", report.written_bytes);
  out.member("read_bytes", report.read_bytes).member("gathered_bytes", report.gathered_bytes);
  out.member("elapsed_s", report.elapsed_s).member("durable_s", report.durable_s);
  out.member("durable", report.is_durable);
  out.member("coverage", "proven").member("digest", digest_text(report.digest));
  state_digest_member(out, report.state_digest);
  files_member(out, report.files);
  damaged_member(out, report.damaged);
  names_member(out, "copied", report.copied);
  names_member(out, "left_out", report.left_out);
  compared_members(out, report.compared);
  budget_member(out, report.budget);
  outcome_members(out, {report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  return out.end_object().text();
}

std::string save_text(const SaveReport& report) {
  std::string text =
      fmt::format("{}: {} in {}, written in {:.2f} s, durable after {:.2f} s\n",
                  printable(report.path), format_size(report.written_bytes),
                  counted(report.files.size(), "file"), report.elapsed_s, report.durable_s);
  if (report.is_preempted)
    text += "a stop signal came while the checkpoint was saved: it is complete\n";
  text += names_text("copied", report.copied);
  text += names_text("left out", report.left_out) + "\n";
  text += outcome_text({report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  text += budget_text(report.budget) + compared_text(report.compared) + "digest " +
          digest_text(report.digest) + "\n";
  if (report.state_digest) text += "state digest " + digest_text(*report.state_digest) + "\n";
  return text + warnings_text(report.checkpoint.warnings);
}

std::string convert_json(const ConvertReport& report) {
  JsonWriter out;
  out.begin_object();
  checkpoint_members(out, report.checkpoint);
  if (report.step) out.member("step", *report.step);
  out.member("path", report.path).member("written_bytes", report.written_bytes);
  out.member("kept_files", report.kept_files).member("elapsed_s", report.elapsed_s);
  out.member("durable", report.is_durable);
  out.member("coverage", "proven").member("digest", digest_text(report.digest));
  files_member(out, report.files);
  names_member(out, "left_out", report.left_out);
  if (!report.step) compared_members(out, report.compared);
  if (report.losses) losses_members(out, *report.losses);
  budget_member(out, report.budget);
  outcome_members(out, {report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  return out.end_object().text();
}

std::string convert_text(const ConvertReport& report) {
  std::string text = fmt::format("{}: {} written in {:.2f} s, {}", printable(report.path),
                                 format_size(report.written_bytes), report.elapsed_s,
                                 counted(report.files.size(), "file"));
  if (report.kept_files > 0) text += fmt::format(", {} kept", report.kept_files);
  text += '\n';
  text += names_text("left out", report.left_out) + "\n";
  text += outcome_text({report.promise, report.ranks, report.launcher, report.cgroup_peak_bytes});
  text += budget_text(report.budget) + compared_text(report.compared) + "digest " +
          digest_text(report.digest) + "\n";
  return text + warnings_text(report.checkpoint.warnings);
}

}  // namespace modicum
