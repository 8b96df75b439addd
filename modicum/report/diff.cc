#include <fmt/format.h>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {
namespace {

// "[3, 7]": the place of the element with a row-major index; "[]" of a scalar.
std::string place_text(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> place(shape.size());
  for (size_t dim = shape.size(); dim-- > 0;) {
    place[dim] = index % shape[dim];
    index /= shape[dim];
  }
  return fmt::format("[{}]", fmt::join(place, ", "));
}

std::string dtype_text(const DiffReport::Difference& of) {
  std::string text = fmt::format(" {} vs {}; ", of.dtype_a, of.dtype_b);
  if (of.rounded_to.empty()) return text + "values not compared";
  if (of.count == 0) return text + fmt::format("equal after rounding to {}", of.rounded_to);
  return text + fmt::format("{} value(s) differ after rounding to {}", of.count, of.rounded_to);
}

}  // namespace

std::string diff_json(const DiffReport& report) {
  JsonWriter out;
  out.begin_object().member("equal", report.differences.empty());
  out.member("tensors_compared", report.tensors).member("bytes_compared", report.bytes);
  compared_members(out, report.with_record);
  out.key("differences").begin_array();
  for (const DiffReport::Difference& of : report.differences) {
    out.begin_object().member("tensor", of.tensor).member("kind", of.kind);
    out.member("first_index", of.first_index).member("count", of.count);
    if (of.kind == "dtype") {
      const bool is_compared = !of.rounded_to.empty();
      out.member("a", of.dtype_a).member("b", of.dtype_b).member("compared", is_compared);
      if (is_compared) {
        out.member("rounded_to", of.rounded_to).member("equal_after_rounding", of.count == 0);
      }
    }
    if (of.largest) {
      out.member("largest_difference", *of.largest).member("largest_index", of.largest_index);
    }
    out.end_object();
  }
  return out.end_array().end_object().text();
}

std::string diff_text(const DiffReport& report) {
  std::string text;
  for (const DiffReport::Difference& of : report.differences) {
    text += fmt::format("{}: {}", printable(of.tensor), of.kind);
    if (of.kind == "values") {
      text += fmt::format(", {} element(s), the first is {}", of.count, of.first_index);
    } else if (of.kind == "dtype") {
      text += dtype_text(of);
    }
    if (of.largest) {
      text += fmt::format(", the largest difference is {:.6g} at {}", *of.largest,
                          place_text(of.largest_index, of.shape));
    }
    text += '\n';
  }
  return text + compared_text(report.with_record) +
         fmt::format("{} tensor(s), {} compared: {} difference(s)\n", report.tensors,
                     format_size(report.bytes), report.differences.size());
}

}  // namespace modicum
