#include <fmt/format.h>

#include <algorithm>

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

// "", or ", 2 finite values became infinite".
std::string overflow_text(int64_t overflowed) {
  if (overflowed == 0) return "";
  return fmt::format(", {} became infinite",
                     counted(static_cast<uint64_t>(overflowed), "finite value"));
}

std::string dtype_text(const DiffReport::Difference& difference) {
  std::string text = fmt::format(" {} vs {}; ", difference.dtype_a, difference.dtype_b);
  if (difference.rounded_to.empty()) return text + "values not compared";
  if (difference.count > 0) {
    text += fmt::format("{} {}", counted(static_cast<uint64_t>(difference.count), "value"),
                        difference.count == 1 ? "differs" : "differ");
  } else {
    text += "equal";
  }
  return text + fmt::format(" after rounding to {}{}", difference.rounded_to,
                            overflow_text(difference.overflowed));
}

std::string summary_of(const DiffReport& report) {
  const uint64_t rounded = report.equal_after_rounding(), all = report.differences.size();
  if (rounded == 0) return counted(all, "difference");
  if (rounded == all) {
    return fmt::format("{} {}; {}", counted(rounded, "dtype"), rounded == 1 ? "differs" : "differ",
                       report.rounding_text());
  }
  return fmt::format("{}, {} of dtype only: values are equal after rounding",
                     counted(all, "difference"), rounded);
}

}  // namespace

uint64_t DiffReport::equal_after_rounding() const noexcept {
  return static_cast<uint64_t>(std::ranges::count_if(differences, [](const Difference& found) {
    return !found.rounded_to.empty() && found.count == 0;
  }));
}

std::string DiffReport::rounding_text() const {
  int64_t overflowed = 0;
  for (const Difference& difference : differences) overflowed += difference.overflowed;
  return "all values are equal after rounding" + overflow_text(overflowed);
}

std::string diff_json(const DiffReport& report) {
  JsonWriter out;
  out.begin_object().member("equal", report.differences.empty());
  out.member("equal_after_rounding", report.equal_after_rounding() == report.differences.size());
  out.member("tensors_compared", report.tensors).member("bytes_compared", report.bytes);
  compared_members(out, report.with_record);
  out.key("differences").begin_array();
  for (const DiffReport::Difference& difference : report.differences) {
    out.begin_object().member("tensor", difference.tensor).member("kind", difference.kind);
    out.member("first_index", difference.first_index).member("count", difference.count);
    if (difference.kind == "dtype") {
      const bool is_compared = !difference.rounded_to.empty();
      out.member("a", difference.dtype_a)
          .member("b", difference.dtype_b)
          .member("compared", is_compared);
      if (is_compared) {
        out.member("rounded_to", difference.rounded_to)
            .member("equal_after_rounding", difference.count == 0)
            .member("overflowed", difference.overflowed);
      }
    }
    if (difference.largest) {
      out.member("largest_difference", *difference.largest)
          .member("largest_index", difference.largest_index);
    }
    out.end_object();
  }
  out.end_array();
  warnings_member(out, report.warnings);
  return out.end_object().text();
}

std::string diff_text(const DiffReport& report) {
  std::string text;
  for (const DiffReport::Difference& difference : report.differences) {
    text += fmt::format("{}: {}", printable(difference.tensor), difference.kind);
    if (difference.kind == "values") {
      text += fmt::format(", {}, the first at {}",
                          counted(static_cast<uint64_t>(difference.count), "element"),
                          place_text(difference.first_index, difference.shape));
    } else if (difference.kind == "dtype") {
      text += dtype_text(difference);
    }
    if (difference.largest) {
      text += fmt::format(", the largest difference is {:.6g} at {}", *difference.largest,
                          place_text(difference.largest_index, difference.shape));
    }
    text += '\n';
  }
  return text + compared_text(report.with_record) +
         fmt::format("{}, {} compared: {}\n", counted(report.tensors, "tensor"),
                     format_size(report.bytes), summary_of(report)) +
         warnings_text(report.warnings);
}

}  // namespace modicum
