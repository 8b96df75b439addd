#include "modicum/base/sizes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "modicum/base/error.h"

namespace modicum {
namespace {

struct Unit {
  std::string_view suffix;
  uint64_t factor;
};

constexpr std::array<Unit, 14> kSizeUnits = {{{"", 1},
                                              {"B", 1},
                                              {"KB", 1'000},
                                              {"MB", 1'000'000},
                                              {"GB", 1'000'000'000},
                                              {"TB", 1'000'000'000'000},
                                              {"KiB", kKiB},
                                              {"MiB", kMiB},
                                              {"GiB", kGiB},
                                              {"TiB", 1024 * kGiB},
                                              {"K", kKiB},
                                              {"M", kMiB},
                                              {"G", kGiB},
                                              {"T", 1024 * kGiB}}};
constexpr std::array<Unit, 4> kCountUnits = {
    {{"", 1}, {"K", 1'000}, {"M", 1'000'000}, {"B", 1'000'000'000}}};

// In any locale.
char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool is_same_but_for_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lower(x) == lower(y); });
}

template <size_t N>
std::vector<std::string> names_of(const std::array<Unit, N>& units) {
  std::vector<std::string> names;
  for (const Unit& unit : units) {
    if (!unit.suffix.empty()) names.emplace_back(unit.suffix);
  }
  return names;
}

template <size_t N>
uint64_t parse_with_units(std::string_view text, const std::array<Unit, N>& units,
                          std::string_view what) {
  auto refuse = [&](std::string_view why) {
    fail(Category::usage, fmt::format("not a {}: '{}' ({})", what, printable(text), why));
  };
  if (text.starts_with('-')) refuse("negative");
  const size_t number_end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, number_end);
  const size_t unit_begin = std::min(text.find_first_not_of(' ', number_end), text.size());
  // Spaces without a unit after them stay in the suffix, which is then an unknown unit.
  const std::string_view suffix = text.substr(unit_begin < text.size() ? unit_begin : number_end);
  const auto unit = std::find_if(units.begin(), units.end(), [&](const Unit& u) {
    return is_same_but_for_case(u.suffix, suffix);
  });
  if (unit == units.end()) {
    refuse(fmt::format("unknown unit '{}'{}", printable(suffix),
                       nearest_hint(suffix, names_of(units))));
  }
  const auto* const point = std::find(number.begin(), number.end(), '.');
  const std::string_view whole(number.begin(), point);
  std::string_view fraction(point == number.end() ? point : point + 1, number.end());
  if (std::find(fraction.begin(), fraction.end(), '.') != fraction.end() ||
      whole.size() + fraction.size() == 0) {
    refuse("not a number");
  }
  // In integers, since a double misses 1.001M by one. Floors may be nested: digit by digit.
  uint64_t parts = 0;
  for (; !fraction.empty(); fraction.remove_suffix(1)) {
    parts = (static_cast<uint64_t>(fraction.back() - '0') * unit->factor + parts) / 10;
  }
  uint64_t whole_units = 0;
  if (!whole.empty() &&
      std::from_chars(whole.data(), whole.data() + whole.size(), whole_units).ec != std::errc()) {
    refuse("too large");
  }
  const auto product = checked_mul(whole_units, unit->factor);
  const auto sum = product ? checked_add(*product, parts) : product;
  if (!sum || *sum > uint64_t{std::numeric_limits<int64_t>::max()}) refuse("too large");
  return *sum;
}

// Levenshtein's distance, one row of the table at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

uint64_t parse_size(std::string_view text) { return parse_with_units(text, kSizeUnits, "size"); }
uint64_t parse_count(std::string_view text) { return parse_with_units(text, kCountUnits, "count"); }

std::string format_size(uint64_t bytes) {
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  constexpr std::array<std::string_view, 5> kNames = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kNames[unit]);
}

std::string over_budget(uint64_t budget, uint64_t needed, std::string_view source) {
  return fmt::format("budget {}{}, needed {}, short by {}", format_size(budget),
                     source.empty() ? "" : fmt::format(" ({})", source), format_size(needed),
                     format_size(needed - budget));
}

std::string counted(uint64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : noun.ends_with('s') ? "es" : "s");
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::min<size_t>(3, std::max<size_t>(1, name.size() / 2)) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string nearest_hint(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string near = nearest_name(name, candidates);
  return near.empty() ? "" : fmt::format("; nearest is '{}'", near);
}

}  // namespace modicum
