#include "modicum/report/past_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/json/json.h"
#include "modicum/report/members.h"

namespace modicum {
namespace {

std::optional<uint64_t> bytes_or_null(JsonValue& value) {
  if (value.kind() == JsonValue::Kind::null) return std::nullopt;
  return static_cast<uint64_t>(value.integer());
}

class PastRunReader {
 public:
  PastRun read(JsonValue& root) {
    std::optional<uint64_t> held_bytes;
    root.object([&](std::string_view key, JsonValue& value) {
      if (key == "peak_bytes") held_bytes = bytes_or_null(value);
      if (key == "limit_bytes") limit_bytes_ = bytes_or_null(value);
      if (key == "killed") read_kill(value);
      if (key == "timeline") read_timeline(value);
      if (key == "error") held_bytes = read_refusal(value);
    });
    if (!held_bytes) {
      fail(Category::usage, "the document has no peak",
           {.expected = "the output of `watch --json`, or an error BUDGET"});
    }
    run_.held_bytes = *held_bytes;
    // Takes the first known limit: that of the kill, that of the command (in a refusal: its
    // budget), that of the cgroup, and last the budget in the timeline.
    for (const auto& limit : {of_kill_, limit_bytes_, of_group_, of_budget_}) {
      if (!run_.limit_bytes) run_.limit_bytes = limit;
    }
    return run_;
  }

 private:
  void read_kill(JsonValue& killed) {
    if (killed.kind() == JsonValue::Kind::null) return;
    killed.object([&](std::string_view key, JsonValue& value) {
      if (key == "name") run_.killed = value.string();
      if (key == "limit_bytes") of_kill_ = bytes_or_null(value);
    });
  }

  void read_timeline(JsonValue& timeline) {
    if (timeline.kind() == JsonValue::Kind::null) return;
    timeline.object([&](std::string_view key, JsonValue& value) {
      if (key == "limit_bytes") of_group_ = bytes_or_null(value);
      if (key == "budget_bytes") of_budget_ = bytes_or_null(value);
    });
  }

  // The bytes that a run refused with BUDGET would have held; nullopt for any other error.
  std::optional<uint64_t> read_refusal(JsonValue& error) {
    std::optional<uint64_t> got, expected;
    error.object([&](std::string_view key, JsonValue& value) {
      if (key == "shortfall_bytes") run_.is_refused = true;
      const bool is_number = value.kind() == JsonValue::Kind::number;
      if (key == "got" && is_number) got = bytes_or_null(value);
      if (key == "expected" && is_number) expected = bytes_or_null(value);
    });
    if (!run_.is_refused) return std::nullopt;
    limit_bytes_ = expected;
    return got;
  }

  PastRun run_;
  std::optional<uint64_t> limit_bytes_, of_kill_, of_group_, of_budget_;
};

}  // namespace

namespace {

std::string held_text(const PastRun& run, uint64_t limit) {
  std::string text =
      fmt::format("this run {} {}, {} {}", run.is_refused ? "would have held" : "held",
                  format_size(run.held_bytes),
                  run.limit_bytes == limit ? "the limit was" : "the budget is", format_size(limit));
  if (run.held_bytes > limit)
    text += fmt::format(" ({} over)", format_size(run.held_bytes - limit));
  if (run.killed.empty()) return text;
  return text + fmt::format(" and the kernel killed {}", printable(run.killed));
}

}  // namespace

std::string past_run_sentence(const PlanReport& report) {
  std::string text = held_text(*report.past, report.budget->bytes);
  if (!report.refusal) {
    if (report.wider_refusal) {
      text += "; the planned load fits, but " + report.wider_refusal->what_happened();
      if (report.alternatives.empty()) return text;
      const Alternative& cheapest = report.alternatives.front();
      return text + fmt::format("; {} would fit: {}: at most {} on a node", cheapest.who,
                                changes_text(cheapest), format_size(cheapest.peak_bytes));
    }
    if (report.job_fits.value_or(true)) return text + "; the planned run fits without a change";
    text += "; the planned load fits, but " + job_shortfall(report);
  }
  if (report.alternatives.empty() || !report.alternatives.front().who.empty()) {
    return text + "; no dtype, state format, strategy, staging or number of nodes fits";
  }
  const Alternative& cheapest = report.alternatives.front();
  text += "; the cheapest change that fits is " + cheapest.flags;
  if (cheapest.flags.find("--ranks-per-node") != std::string::npos) {
    text += fmt::format(" ({} nodes)", ceil_div(report.ranks, cheapest.ranks_per_node));
  }
  text += fmt::format(": at most {} on a node", format_size(cheapest.peak_bytes));
  return cheapest.note.empty() ? text : fmt::format("{} ({})", text, cheapest.note);
}

void past_run_member(JsonWriter& out, const PlanReport& report) {
  const PastRun& run = *report.past;
  const uint64_t limit = report.budget->bytes;
  out.key("from").begin_object().member("file", run.file).member("held_bytes", run.held_bytes);
  out.member("limit_bytes", limit);
  out.member("over_bytes", run.held_bytes - std::min(run.held_bytes, limit));
  out.member("refused", run.is_refused).member("killed", !run.killed.empty());
  out.member("sentence", past_run_sentence(report)).key("change");
  if (report.alternatives.empty()) {
    out.null();
  } else {
    alternative_object(out, report.alternatives.front());
  }
  out.end_object();
}

PastRun read_past_run(std::string_view text, const std::string& file) {
  PastRun run;
  try {
    read_json(text, [&](JsonValue& root) { run = PastRunReader().read(root); });
  } catch (const JsonError& error) {
    fail(Category::usage, fmt::format("--from: {}", error.what()),
         {.file = file, .offset = error.offset});
  } catch (const Error& error) {
    fail(error.category(), fmt::format("--from: {}", error.what_happened()), {.file = file});
  }
  run.file = file;
  return run;
}

}  // namespace modicum
