#include "modicum/base/error.h"

#include <fmt/format.h>

#include <array>
#include <utility>

namespace modicum {
namespace {

struct Row {
  std::string_view name;
  int exit_code;
};

constexpr std::array<Row, static_cast<size_t>(Category::count)> kRows = {{
    {"FORMAT.TRUNC", 10},
    {"FORMAT.LIMIT", 10},
    {"FORMAT.HEADER", 10},
    {"FORMAT.UTF8", 10},
    {"FORMAT.JSON", 10},
    {"FORMAT.SCHEMA", 10},
    {"FORMAT.DUP", 10},
    {"FORMAT.NAME", 10},
    {"FORMAT.DTYPE", 10},
    {"FORMAT.OVERFLOW", 10},
    {"FORMAT.ALIGN", 10},
    {"FORMAT.OFFSETS", 10},
    {"FORMAT.SIZE", 10},
    {"FORMAT.OVERLAP", 10},
    {"FORMAT.HOLE", 10},
    {"FORMAT.TRAILING", 10},
    {"FORMAT.PICKLE", 10},
    {"INDEX.JSON", 11},
    {"INDEX.SCHEMA", 11},
    {"INDEX.DUP", 11},
    {"INDEX.PATH", 11},
    {"INDEX.MISSING_SHARD", 11},
    {"INDEX.MISSING_TENSOR", 11},
    {"INDEX.AMBIGUOUS", 11},
    {"INTEGRITY", 12},
    {"IO", 13},
    {"NOSPACE", 14},
    {"BUDGET", 15},
    {"NOMEM", 16},
    {"PEER", 17},
    {"STALL", 18},
    {"UNCOMMITTED", 19},
    {"CONFLICT", 20},
    {"PREEMPTED", 21},
    {"UNSUPPORTED", 2},
    {"MISMATCH", 2},
    {"USAGE", 2},
    {"INTERNAL", 70},
    {"CANCELLED", 130},
}};

const Row& row(Category category) noexcept { return kRows[static_cast<size_t>(category)]; }

std::string one_line(Category category, const std::string& what_happened, const Facts& facts) {
  std::string details;
  auto add = [&details](std::string_view label, std::string_view value) {
    if (value.empty()) return;
    details += fmt::format("{}{} {}", details.empty() ? "" : ", ", label, value);
  };
  auto number = [](const auto& value) { return value ? fmt::format("{}", *value) : std::string(); };
  add("file", printable(facts.file));
  add("tensor", printable(facts.tensor));
  add("offset", number(facts.offset));
  add("rank", number(facts.rank));
  add("culprit rank", number(facts.culprit_rank));
  add("pid", number(facts.culprit_pid));
  if (!facts.shortfall_bytes) {
    add("expected", facts.expected);
    add("got", facts.got);
  }
  std::string line = fmt::format("{}: {}", category_name(category), what_happened);
  if (!details.empty()) line += fmt::format(" ({})", details);
  return line;
}

}  // namespace

std::string_view category_name(Category category) noexcept { return row(category).name; }
int exit_code(Category category) noexcept { return row(category).exit_code; }
bool is_damage(Category category) noexcept {  // the enum begins with FORMAT.*, INDEX.*, INTEGRITY
  return category <= Category::integrity || category == Category::uncommitted;
}

Error::Error(Category category, std::string what_happened, Facts facts)
    : category_(category),
      what_happened_(std::move(what_happened)),
      facts_(std::move(facts)),
      line_(one_line(category_, what_happened_, facts_)) {}

void fail(Category category, std::string what_happened, Facts facts) {
  throw Error(category, std::move(what_happened), std::move(facts));
}

size_t checked_index(std::string_view noun, size_t index, size_t count) {
  if (index < count) return index;
  fail(Category::usage, fmt::format("the index of a {} is out of range", noun),
       {.expected = fmt::format("< {}", count), .got = std::to_string(index)});
}

int checked_rank(int rank, int world_size) {
  if (rank >= 0 && rank < world_size) return rank;
  fail(Category::usage, "a rank is out of range",
       {.expected = fmt::format("0 to {}", world_size - 1), .got = std::to_string(rank)});
}

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 256;
  std::string out;
  for (const char c : name) {
    if (out.size() >= kLongest) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

void assertion_failed(const char* condition, const char* file, int line) {
  fail(Category::internal, fmt::format("assertion failed at {}:{}: {}", file, line, condition));
}

}  // namespace modicum
