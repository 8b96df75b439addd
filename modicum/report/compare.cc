#include "modicum/report/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/report/owners.h"
#include "modicum/spec/spec.h"
#include "modicum/watch/watch.h"

namespace modicum {
namespace {

using Bytes = std::map<std::string, uint64_t>;

// The members of a run document that a comparison needs.
struct ReadDocument {
  struct Phase {
    std::string name;
    double begin_s = 0, end_s = 0;
  };
  std::vector<double> t_s;
  std::map<std::string, std::vector<uint64_t>> owners;  // summed over the tracks, by sample
  std::set<size_t> lengths;                             // of all owners' lists
  std::vector<Phase> phases;
  std::optional<uint64_t> peak_bytes;
  uint64_t at_most_bytes = 0;
  std::string cause;
  int64_t exit_code = 0;
};

uint64_t bytes_in(JsonValue& value) { return static_cast<uint64_t>(value.integer()); }

void add_owner(JsonValue& value, ReadDocument& to, std::vector<uint64_t>& sums) {
  size_t sample = 0;
  value.array([&](JsonValue& element) {
    if (sums.size() == sample) sums.push_back(0);
    uint64_t& sum = sums[sample++];
    if (element.kind() == JsonValue::Kind::null) return;
    sum = saturating_add(sum, bytes_in(element));
  });
  to.lengths.insert(sample);
}

void read_phase(JsonValue& value, ReadDocument& to) {
  ReadDocument::Phase& phase = to.phases.emplace_back();
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "name") phase.name = printable(member.string());
    if (key == "begin_s") phase.begin_s = member.number();
    if (key == "end_s") phase.end_s = member.number();
  });
}

void read_timeline(JsonValue& value, ReadDocument& to) {
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "t_s") {
      member.array([&](JsonValue& at) { to.t_s.push_back(at.number()); });
    } else if (key == "phases") {
      member.array([&](JsonValue& phase) { read_phase(phase, to); });
    } else if (key == "tracks") {
      member.array([&](JsonValue& track) {
        track.object([&](std::string_view track_key, JsonValue& owners) {
          if (track_key != "owners") return;
          owners.object([&](std::string_view owner, JsonValue& bytes) {
            add_owner(bytes, to, to.owners[printable(owner)]);
          });
        });
      });
    }
  });
}

ReadDocument read_document(std::string_view text) {
  ReadDocument to;
  read_json(text, [&](JsonValue& root) {
    root.object([&](std::string_view key, JsonValue& value) {
      if (key == "timeline") read_timeline(value, to);
      if (key == "exit_code") to.exit_code = value.integer();
      if (key != "peak") return;
      value.object([&](std::string_view peak_key, JsonValue& member) {
        if (peak_key == "bytes") to.peak_bytes = bytes_in(member);
        if (peak_key == "at_most_bytes") to.at_most_bytes = bytes_in(member);
        if (peak_key == "cause") to.cause = printable(member.string());
      });
    });
  });
  return to;
}

[[noreturn]] void refuse(const std::string& name, const std::string& what, std::string got) {
  fail(Category::format_schema, fmt::format("not the JSON document of a watched run: {}", what),
       {.file = name, .expected = "the output of `modicum watch --json`", .got = std::move(got)});
}

void require_whole(const ReadDocument& document, const std::string& name) {
  if (!document.peak_bytes) refuse(name, "it has no peak", "no member peak.bytes");
  for (const size_t length : document.lengths) {
    if (length == document.t_s.size()) continue;
    refuse(name, "an owner needs one number per sample",
           fmt::format("{} numbers for {} samples", length, document.t_s.size()));
  }
}

std::vector<uint64_t> totals_of(const ReadDocument& document) {
  std::vector<uint64_t> totals(document.t_s.size());
  for (const auto& [owner, bytes] : document.owners) {
    for (size_t s = 0; s < totals.size(); ++s) totals[s] = saturating_add(totals[s], bytes[s]);
  }
  return totals;
}

uint64_t amount_in(const Bytes& bytes, const std::string& key) {
  const auto found = bytes.find(key);
  return found == bytes.end() ? 0 : found->second;
}

// The key whose bytes differ most between `a` and `b`; "" if no key's bytes differ. With `in_both`,
// only keys that are in both count.
std::string differs_most(const Bytes& a, const Bytes& b, bool in_both) {
  Bytes all = a;
  all.insert(b.begin(), b.end());
  std::string most;
  uint64_t largest = 0;
  for (const auto& [key, unused] : all) {
    if (in_both && (!a.contains(key) || !b.contains(key))) continue;
    const uint64_t in_a = amount_in(a, key), in_b = amount_in(b, key);
    const uint64_t difference = in_a > in_b ? in_a - in_b : in_b - in_a;
    if (difference <= largest) continue;
    largest = difference;
    most = key;
  }
  return most;
}

std::string signed_size(uint64_t a, uint64_t b) {
  if (a == b) return "0 B";
  return fmt::format("{}{}", a > b ? '-' : '+', format_size(a > b ? a - b : b - a));
}

std::string row(const std::string& what, uint64_t a, uint64_t b) {
  return fmt::format("{:<28}{:>14}{:>14}{:>15}\n", what, format_size(a), format_size(b),
                     signed_size(a, b));
}

// The rows of owners. If they aren't comparable, an owner that a run lacks has no bytes there.
std::string owner_rows(const RunComparison& runs, const std::vector<std::string>& owners) {
  const Bytes &a = runs.a.owners, &b = runs.b.owners;
  std::string text;
  for (const std::string& owner : owners) {
    if (runs.has_comparable_owners()) {
      text += row("  " + owner_words(owner), amount_in(a, owner), amount_in(b, owner));
      continue;
    }
    const auto size = [&owner](const Bytes& bytes) {
      return bytes.contains(owner) ? format_size(bytes.at(owner)) : std::string("-");
    };
    text +=
        fmt::format("{:<28}{:>14}{:>14}{:>15}\n", "  " + owner_words(owner), size(a), size(b), "-");
  }
  return text;
}

// All keys whose bytes differ, the largest difference first.
std::vector<std::string> by_difference(Bytes a, Bytes b) {
  std::vector<std::string> keys;
  while (true) {
    const std::string most = differs_most(a, b, false);
    if (most.empty()) return keys;
    keys.push_back(most);
    a.erase(most);
    b.erase(most);
  }
}

void rows_member(JsonWriter& out, const char* name, const Bytes& a, const Bytes& b) {
  Bytes all = a;
  all.insert(b.begin(), b.end());
  const auto bytes = [&out](const char* key, const Bytes& from, const std::string& what) {
    const auto found = from.find(what);
    out.member(key, found == from.end() ? std::nullopt : std::optional(found->second));
  };
  out.key(name).begin_array();
  for (const auto& [key, unused] : all) {
    out.begin_object().member("name", key);
    bytes("a_bytes", a, key);
    bytes("b_bytes", b, key);
    out.end_object();
  }
  out.end_array();
}

void run_member(JsonWriter& out, const char* key, const WatchedRun& run) {
  out.key(key).begin_object().member("file", run.name).member("peak_bytes", run.peak_bytes);
  out.member("at_most_bytes", run.at_most_bytes)
      .member("exit_code", run.exit_code)
      .member("cause", run.peak_cause)
      .end_object();
}

void name_member(JsonWriter& out, const char* key, const std::string& name) {
  out.key(key);
  if (name.empty()) {
    out.null();
  } else {
    out.value(name);
  }
}

}  // namespace

WatchedRun parse_run(std::string_view text, const std::string& name) {
  ReadDocument read;
  try {
    read = read_document(text);
  } catch (const JsonError& error) {
    fail(error.format_category(),
         fmt::format("not the JSON document of a watched run: {}", error.what()),
         {.file = name, .offset = error.offset});
  }
  require_whole(read, name);
  WatchedRun run{.name = name, .peak_bytes = *read.peak_bytes, .peak_cause = read.cause};
  run.exit_code = read.exit_code;
  run.at_most_bytes =
      may_be_missed(run.peak_bytes, read.at_most_bytes) ? read.at_most_bytes : run.peak_bytes;
  const std::vector<uint64_t> totals = totals_of(read);
  if (totals.empty()) return run;
  const auto peak = std::max_element(totals.begin(), totals.end()) - totals.begin();
  for (const auto& [owner, bytes] : read.owners) {
    if (const uint64_t owner_bytes = bytes[static_cast<size_t>(peak)]; owner_bytes > 0)
      run.owners[owner] = owner_bytes;
  }
  for (size_t p = 0; p < static_cast<size_t>(Purpose::count); ++p) {
    run.has_reports |= read.owners.contains(std::string(purpose_name(static_cast<Purpose>(p))));
  }
  for (const ReadDocument::Phase& phase : read.phases) {
    for (size_t s = 0; s < totals.size(); ++s) {
      if (read.t_s[s] < phase.begin_s || read.t_s[s] > phase.end_s) continue;
      uint64_t& most = run.phases[phase.name];
      most = std::max(most, totals[s]);
    }
  }
  return run;
}

bool RunComparison::is_certain() const noexcept {
  const auto is_below = [](const WatchedRun& less, const WatchedRun& more) {
    return less.at_most_bytes <= more.peak_bytes;
  };
  const bool is_equal = a.peak_bytes == b.peak_bytes;
  return is_equal ? is_below(a, b) && is_below(b, a) : is_below(a, b) || is_below(b, a);
}

std::string RunComparison::owner() const {
  const bool is_comparable = is_certain() && has_comparable_owners();
  return is_comparable ? differs_most(a.owners, b.owners, false) : "";
}
std::string RunComparison::phase() const {
  return is_certain() ? differs_most(a.phases, b.phases, true) : "";
}

std::string RunComparison::sentence() const {
  std::string text = compared_peaks();
  for (const WatchedRun* const run : {&a, &b}) {
    if (run->exit_code == 0) continue;
    text += fmt::format("; {} ended with exit code {}, perhaps before its peak", run->name,
                        run->exit_code);
  }
  return text;
}

std::string RunComparison::compared_peaks() const {
  if (a.peak_bytes == b.peak_bytes && is_certain()) {
    return fmt::format("{} and {} have the same peak, {}", a.name, b.name,
                       format_size(a.peak_bytes));
  }
  if (!is_certain()) {
    const auto range = [](const WatchedRun& run) {
      return fmt::format("that of {} is {} to {}", run.name, format_size(run.peak_bytes),
                         format_size(run.at_most_bytes));
    };
    return fmt::format("it is not certain which peak is higher: {}, {}", range(a), range(b));
  }
  const bool is_a_higher = a.peak_bytes > b.peak_bytes;
  const WatchedRun& more = is_a_higher ? a : b;
  const WatchedRun& less = is_a_higher ? b : a;
  std::string text =
      fmt::format("the peak of {} is {} higher than that of {} ({} against {})", more.name,
                  format_size(more.peak_bytes - less.peak_bytes), less.name,
                  format_size(more.peak_bytes), format_size(less.peak_bytes));
  if (!has_comparable_owners()) {
    text += fmt::format(
        "; owners are not compared: the memory of {} is divided by kind only, as no process of it "
        "reported to Modicum",
        a.has_reports ? b.name : a.name);
  }
  if (const std::string most = owner(); !most.empty()) {
    text += fmt::format("; at the peaks, the owner \"{}\" differs most ({} against {})",
                        owner_words(most), format_size(amount_in(more.owners, most)),
                        format_size(amount_in(less.owners, most)));
  }
  if (const std::string most = phase(); !most.empty()) {
    text += fmt::format("; of the phases that both have, `{}` differs most ({} against {})", most,
                        format_size(amount_in(more.phases, most)),
                        format_size(amount_in(less.phases, most)));
  }
  return text;
}

std::string comparison_json(const RunComparison& runs) {
  JsonWriter out;
  out.begin_object();
  run_member(out, "a", runs.a);
  run_member(out, "b", runs.b);
  out.member("difference_bytes",
             static_cast<int64_t>(runs.b.peak_bytes) - static_cast<int64_t>(runs.a.peak_bytes));
  name_member(out, "owner", runs.owner());
  name_member(out, "phase", runs.phase());
  out.member("is_certain", runs.is_certain());
  out.member("has_comparable_owners", runs.has_comparable_owners());
  rows_member(out, "owners", runs.a.owners, runs.b.owners);
  rows_member(out, "phases", runs.a.phases, runs.b.phases);
  return out.member("sentence", runs.sentence()).end_object().text();
}

std::string comparison_text(const RunComparison& runs) {
  const WatchedRun &a = runs.a, &b = runs.b;
  std::string text = runs.sentence() + "\n\n";
  text += fmt::format("{:<28}{:>14}{:>14}{:>15}\n", "", "A", "B", "B - A");
  text += row("peak", a.peak_bytes, b.peak_bytes);
  if (a.at_most_bytes > a.peak_bytes || b.at_most_bytes > b.peak_bytes) {
    text += row("peak, at most", a.at_most_bytes, b.at_most_bytes);
  }
  text += owner_rows(runs, by_difference(a.owners, b.owners));
  for (const std::string& phase : by_difference(a.phases, b.phases)) {
    text += row("during " + phase, amount_in(a.phases, phase), amount_in(b.phases, phase));
  }
  const auto described = [](std::string_view label, const WatchedRun& run) {
    const std::string end =
        run.exit_code == 0 ? "" : fmt::format(" (ended with exit code {})", run.exit_code);
    return fmt::format("{}: {}{}\n   {}\n", label, run.name, end, run.peak_cause);
  };
  return text + "\n" + described("A", a) + described("B", b);
}

}  // namespace modicum
