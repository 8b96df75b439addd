#include <fmt/format.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {

std::string verify_json(const VerifyReport& report) {
  JsonWriter out;
  out.begin_object().member("ok", !report.fault).key("files").begin_array();
  for (const VerifyReport::File& file : report.files) {
    out.begin_object().member("name", file.name).member("bytes", file.bytes);
    out.member("result", file.result).end_object();
  }
  out.end_array().member("tensors_checked", report.tensors_checked);
  damaged_member(out, report.damaged);
  warnings_member(out, report.warnings);
  if (report.fault) error_member(out, *report.fault);
  return out.end_object().text();
}

std::string verify_text(const VerifyReport& report) {
  std::string text;
  for (const VerifyReport::File& file : report.files) {
    text +=
        fmt::format("{:>12}  {}: {}\n", format_size(file.bytes), printable(file.name), file.result);
  }
  text += fmt::format("{}, {} checked: {}\n", counted(report.files.size(), "file"),
                      counted(report.tensors_checked, "tensor"), report.fault ? "FAILED" : "ok");
  for (const DamagedCheckpoint& step : report.damaged) {
    text += fmt::format("{:>12}  {}: a save has set it aside; {}\n", format_size(step.bytes),
                        printable(step.path), step.reason.empty() ? "it is intact" : step.reason);
  }
  return text + warnings_text(report.warnings);
}

}  // namespace modicum
