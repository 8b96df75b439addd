#include <fmt/format.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {

std::string diff_json(const DiffReport& report) {
  JsonWriter out;
  out.begin_object().member("equal", report.differences.empty());
  out.member("tensors_compared", report.tensors).member("bytes_compared", report.bytes);
  out.key("differences").begin_array();
  for (const DiffReport::Difference& of : report.differences) {
    out.begin_object().member("tensor", of.tensor).member("kind", of.kind);
    out.member("first_index", of.first_index).member("count", of.count).end_object();
  }
  return out.end_array().end_object().text();
}

std::string diff_text(const DiffReport& report) {
  std::string text;
  for (const DiffReport::Difference& of : report.differences) {
    text += fmt::format("{}: {}", printable(of.tensor), of.kind);
    if (of.kind == "values") {
      text += fmt::format(", {} element(s), the first is {}", of.count, of.first_index);
    }
    text += '\n';
  }
  return text + fmt::format("{} tensor(s), {} compared: {} difference(s)\n", report.tensors,
                            format_size(report.bytes), report.differences.size());
}

}  // namespace modicum
