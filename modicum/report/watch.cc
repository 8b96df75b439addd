#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "modicum/json/json.h"
#include "modicum/report/growth.h"
#include "modicum/report/owners.h"
#include "modicum/report/report.h"
#include "modicum/report/timeline.h"

namespace modicum {
namespace {

constexpr size_t kMaxLines = 12;  // in each list of the text

std::string name_of(const std::string& name, int pid, const std::optional<int>& rank) {
  std::string text = fmt::format("{} (pid {}", printable(name), pid);
  if (rank) text += fmt::format(", rank {}", *rank);
  return text + ")";
}

std::string name_of(const WatchedProcess& process) {
  return name_of(process.name, process.pid, process.rank);
}

// "500.00 MiB"; "1200MiB (1.17 GiB)" if the user has written the size in another way.
std::string size_as_given(const std::string& text, uint64_t bytes) {
  const std::string size = format_size(bytes);
  return text.empty() || parse_size(size) == bytes ? size : fmt::format("{} ({})", text, size);
}

void text_or_null(JsonWriter& out, std::string_view key, const std::string& text) {
  out.key(key);
  if (text.empty()) {
    out.null();
  } else {
    out.value(text);
  }
}

void killed_member(JsonWriter& out, const WatchRecord& record) {
  out.key("killed");
  if (!record.killed) {
    out.null();
    return;
  }
  const WatchedKill& kill = *record.killed;
  out.begin_object().member("pid", kill.pid).member("name", kill.name).member("rank", kill.rank);
  out.member("signal", kill.signal).member("at_s", kill.at_s);
  out.member("limit_bytes", kill.limit_bytes).member("limit_source", kill.limit_source);
  out.member("held_bytes", kill.held_bytes).member("tree_held_bytes", kill.tree_held_bytes);
  out.member("unread_copies_bytes", kill.unread_copies_bytes);
  out.member("page_cache_bytes", kill.page_cache_bytes);
  text_or_null(out, "phase", kill.phase);
  out.key("grew").begin_object().member("pid", kill.grew_pid).member("name", kill.grew_name);
  text_or_null(out, "owner", kill.grew_owner);
  out.member("bytes", kill.grew_bytes).member("seconds", kill.grew_s).end_object();
  out.member("explanation", killed_text(record)).end_object();
}

void processes_member(JsonWriter& out, const WatchRecord& record) {
  out.key("processes").begin_array();
  for (const WatchedProcess& process : record.processes) {
    out.begin_object()
        .member("pid", process.pid)
        .member("ppid", process.parent)
        .member("name", process.name);
    out.member("rank", process.rank).member("peak_bytes", process.peak_bytes);
    out.member("held_at_peak_bytes", process.held_at_peak_bytes);
    out.member("files_at_peak_bytes", process.files_at_peak_bytes);
    out.member("cow_duplicate_bytes", process.cow_duplicate_bytes).key("forked_from");
    if (process.forked_from != 0) {
      out.value(process.forked_from);
    } else {
      out.null();
    }
    out.member("peak_rss_bytes", process.peak_rss_bytes)
        .member("huge_page_bytes", process.huge_page_bytes);
    out.member("begin_s", process.begin_s).member("end_s", process.end_s).end_object();
  }
  out.end_array().member("processes_left_out", record.processes_left_out);
}

void growth_member(JsonWriter& out, const WatchRecord& record) {
  out.key("growth");
  const auto growth = growth_in(record);
  if (!growth) {
    out.null();
    return;
  }
  const WatchedProcess& process = *growth->process;
  out.begin_object().member("pid", process.pid).member("name", process.name);
  out.member("rank", process.rank).member("owner", watch_owner_name(growth->owner));
  out.member("bytes_per_s", std::llround(growth->bytes_per_s));
  out.member("owner_bytes_per_s", std::llround(growth->owner_bytes_per_s));
  out.member("seconds", growth->seconds).end_object();
}

double seconds(uint64_t microseconds) { return static_cast<double>(microseconds) / 1e6; }

void pressure_member(JsonWriter& out, const WatchRecord& record) {
  out.key("pressure");
  if (!record.pressure) {
    out.null();
    return;
  }
  const MemoryPressure& pressure = *record.pressure;
  out.begin_object().member("source", pressure.source).member("some_s", seconds(pressure.some_us));
  out.member("full_s", seconds(pressure.full_us)).end_object();
}

// Empty for waits below 1 % of the run or below 0.1 s, which are usual.
std::string pressure_text(const WatchRecord& record) {
  if (!record.pressure) return "";
  const MemoryPressure& pressure = *record.pressure;
  if (seconds(pressure.some_us) < std::max(0.01 * record.elapsed_s, 0.1)) return "";
  return fmt::format("waited for memory: some process {:.1f} s, all processes {:.1f} s ({})\n",
                     seconds(pressure.some_us), seconds(pressure.full_us), pressure.source);
}

std::string huge_pages_text(const WatchedProcess& process) {
  const uint64_t bytes = process.huge_page_bytes.value_or(0);
  return bytes == 0 ? "" : fmt::format(", up to {} in huge pages", format_size(bytes));
}

// The owners of a process's memory at the tree's peak, the largest first, and the files that it
// maps.
std::string owners_text(const WatchRecord& record, const WatchedProcess& process) {
  constexpr size_t kMaxOwners = 4;
  const WatchSample* const peak = record.peak();
  std::vector<std::pair<uint64_t, size_t>> largest;
  if (peak != nullptr) {
    for (const WatchSample::Share& share : peak->shares) {
      if (&record.processes[share.process] != &process) continue;
      for (size_t owner = 0; owner < kWatchOwners; ++owner) {
        const uint64_t bytes = share.owned.bytes(owner);
        if (bytes >= kMiB && bytes >= share.bytes / 50) largest.emplace_back(bytes, owner);
      }
    }
  }
  std::sort(largest.begin(), largest.end(), std::greater<>());
  if (largest.size() > kMaxOwners) largest.resize(kMaxOwners);
  std::string text;
  for (const auto& [bytes, owner] : largest) {
    if (owner == static_cast<size_t>(WatchOwner::unattributed)) continue;
    text += fmt::format("{} {} {}", text.empty() ? ":" : ",", owner_words(watch_owner_name(owner)),
                        format_size(bytes));
  }
  if (process.files_at_peak_bytes < 16 * kMiB) return text;
  return text + fmt::format("; maps {} of files", format_size(process.files_at_peak_bytes));
}

// The processes, sorted by their memory at the tree's peak, the largest first.
std::vector<const WatchedProcess*> largest(const WatchRecord& record) {
  std::vector<const WatchedProcess*> found;
  for (const WatchedProcess& process : record.processes) found.push_back(&process);
  std::stable_sort(found.begin(), found.end(), [](const auto* a, const auto* b) {
    return std::pair(a->held_at_peak_bytes, a->peak_bytes) >
           std::pair(b->held_at_peak_bytes, b->peak_bytes);
  });
  return found;
}

std::string copies_text(const WatchRecord& record) {
  if (record.cow_duplicate_bytes < kMiB) return "";
  std::string text =
      fmt::format("copies since a fork: {}\n", format_size(record.cow_duplicate_bytes));
  size_t lines = 0;
  for (const WatchedProcess& process : record.processes) {
    if (process.cow_duplicate_bytes < kMiB || ++lines > kMaxLines) continue;
    const auto parent = std::find_if(
        record.processes.begin(), record.processes.end(),
        [&](const WatchedProcess& candidate) { return candidate.pid == process.forked_from; });
    const std::string from = parent == record.processes.end()
                                 ? fmt::format("pid {}", process.forked_from)
                                 : name_of(*parent);
    text += fmt::format("  {:>12}  {}, forked from {}\n", format_size(process.cow_duplicate_bytes),
                        name_of(process), from);
  }
  return text;
}

// Copies that no sample has divided among processes, if they are or may be large; else "".
std::string undivided_copies_text(const WatchedKill& kill) {
  const uint64_t least = std::max(kMiB, kill.tree_held_bytes / 8);
  if (kill.by_group_bytes > least) {
    return fmt::format("up to {} of these", format_size(kill.by_group_bytes));
  }
  if (kill.unread_copies_bytes <= least) return "";
  return fmt::format("up to {} more", format_size(kill.unread_copies_bytes));
}

// The advice at the end of the paragraph about a kill.
std::string what_would_fit(const WatchRecord& record, const WatchedKill& kill) {
  if (kill.promised_bytes > 0) {
    return fmt::format("all processes together predict {}: a limit of that would have fitted",
                       format_size(kill.promised_bytes));
  }
  std::string copies = undivided_copies_text(kill);
  if (copies.empty() && record.cow_duplicate_bytes >= kMiB) {
    copies = format_size(record.cow_duplicate_bytes);
  }
  if (!copies.empty()) {
    return copies +
           " were copies of pages made since a fork: without them this much would have been free";
  }
  const uint64_t others = kill.tree_held_bytes - std::min(kill.tree_held_bytes, kill.held_bytes);
  if (others > kill.held_bytes) {
    return fmt::format("the other processes held {}", format_size(others));
  }
  return fmt::format("the same growth once more would need a limit of at least {}",
                     format_size(kill.limit_bytes + kill.grew_bytes));
}

}  // namespace

std::string growth_text(const WatchRecord& record) {
  const auto growth = growth_in(record);
  if (!growth) return "";
  const auto rate = [](double bytes_per_s) {
    return format_size(static_cast<uint64_t>(std::max(0.0, bytes_per_s)));
  };
  return fmt::format(
      "{} grew by {} per second for the last {:.1f} s before its peak, of which {} {}",
      name_of(*growth->process), rate(growth->bytes_per_s), growth->seconds,
      owner_words(watch_owner_name(growth->owner)), rate(growth->owner_bytes_per_s));
}

std::string next_text(const WatchRecord& record) {
  const auto growth = growth_in(record);
  if (!growth && !record.killed) return "";
  if (record.killed && !undivided_copies_text(*record.killed).empty()) {
    return next_step(kCopiesSinceFork, record.killed->pid);
  }
  const bool is_last_known = !growth && record.killed->grew_pid != 0;
  const int pid = growth          ? growth->process->pid
                  : is_last_known ? record.killed->grew_pid
                                  : record.killed->pid;
  const std::string& name = growth          ? growth->process->name
                            : is_last_known ? record.killed->grew_name
                                            : record.killed->name;
  size_t owner = growth ? growth->owner : kWatchOwners;
  if (!growth) {  // the owner that grew last before the kill
    for (size_t o = 0; o < kWatchOwners; ++o) {
      if (watch_owner_name(o) == record.killed->grew_owner) owner = o;
    }
  }
  const std::string step = owner < kWatchOwners ? next_step(owner, pid) : "";
  if (step.empty()) return "";
  return fmt::format(
      "{}; while a run lasts, `modicum doctor --pid PID` with the PID of {} (here {}) tells what "
      "grows (docs/guide/killed.md)",
      step, printable(name), pid);
}

std::string watch_json(const WatchRecord& record) {
  JsonWriter out;
  out.begin_object().key("command").begin_array();
  for (const std::string& word : record.command) out.value(printable(word));
  out.end_array().member("exit_code", record.exit_code).member("elapsed_s", record.elapsed_s);
  out.member("peak_bytes", record.peak_bytes).member("peak_at_s", record.peak_at_s);
  out.member("cow_duplicate_bytes", record.cow_duplicate_bytes);
  out.member("limit_bytes", record.limit_bytes);
  processes_member(out, record);
  killed_member(out, record);
  growth_member(out, record);
  text_or_null(out, "next", next_text(record));
  timeline_members(out, record);
  pressure_member(out, record);
  out.member("left_running", record.left_running);
  out.key("watch").begin_object().member("cpu_s", record.cpu_s);
  out.member("peak_bytes", record.watcher_peak_bytes).end_object();
  return out.end_object().text();
}

std::string watch_page(const WatchRecord& record) {
  const std::string document = watch_json(record);
  std::string command;
  for (const std::string& word : record.command) {
    command += fmt::format("{}{}", command.empty() ? "" : " ", printable(word));
  }
  const PageRun run{command, document};
  std::string sentence;
  const auto add = [&sentence](const std::string& text) {
    if (text.empty()) return;
    sentence += (sentence.empty() ? "" : " ") + text + (text.ends_with('.') ? "" : ".");
  };
  add(killed_text(record));
  add(growth_text(record));
  if (const std::string next = next_text(record); !next.empty()) add("Next: " + next);
  return report_page("Host memory over time", std::span(&run, 1), {.sentence = sentence});
}

std::string killed_text(const WatchRecord& record) {
  if (!record.killed) return "";
  const WatchedKill& kill = *record.killed;
  std::string text = fmt::format(
      "the kernel killed {} after {:.1f} s{} for lack of memory: {} allows {}. Just before, it "
      "held {}, all processes of the command {}, and {} of page cache were in use.",
      name_of(kill.name, kill.pid, kill.rank), kill.at_s,
      kill.phase.empty() ? "" : fmt::format(", during `{}`,", kill.phase), kill.limit_source,
      record.limit_bytes ? size_as_given(record.limit_text, kill.limit_bytes)
                         : format_size(kill.limit_bytes),
      format_size(kill.held_bytes), format_size(kill.tree_held_bytes),
      format_size(kill.page_cache_bytes));
  if (kill.grew_bytes > 0) {
    const std::string mostly =
        kill.grew_owner.empty() ? "" : fmt::format(", mostly {}", owner_words(kill.grew_owner));
    text += fmt::format(" {} grew last, by {} within {:.2f} s{};",
                        name_of(kill.grew_name, kill.grew_pid, {}), format_size(kill.grew_bytes),
                        kill.grew_s, mostly);
  } else {
    text += " Nothing grew within the last second;";
  }
  return text + fmt::format(" {}.", what_would_fit(record, kill));
}

std::string watch_text(const WatchRecord& record) {
  std::string text =
      fmt::format("\nmodicum watch: peak {} after {:.1f} of {:.1f} s",
                  format_size(record.peak_bytes), record.peak_at_s, record.elapsed_s);
  if (record.limit_bytes) {
    text += fmt::format(", limit {}", size_as_given(record.limit_text, *record.limit_bytes));
  }
  if (!record.phases.empty() || record.may_have_missed_peak()) text += ": " + peak_cause(record);
  text += "\nheld at the peak:\n";
  size_t lines = 0;
  for (const WatchedProcess* const process : largest(record)) {
    if (process->held_at_peak_bytes == 0 || ++lines > kMaxLines) break;
    text +=
        fmt::format("  {:>12}  {}{}\n", format_size(process->held_at_peak_bytes), name_of(*process),
                    owners_text(record, *process) + huge_pages_text(*process));
  }
  const WatchSample* const peak = record.peak();
  if (peak != nullptr && peak->by_group_bytes >= kMiB) {
    text += fmt::format(
        "  {:>12}  counted by the cgroup alone: mostly copies of pages shared since a fork\n",
        format_size(peak->by_group_bytes));
  }
  text += copies_text(record) + pressure_text(record);
  if (record.left_running > 0) {
    text += fmt::format("still running: {} of the command\n",
                        counted(static_cast<uint64_t>(record.left_running), "process"));
  }
  if (record.killed) text += fmt::format("killed: {}\n", killed_text(record));
  if (const std::string growth = growth_text(record); !growth.empty()) text += growth + "\n";
  if (const std::string next = next_text(record); !next.empty()) text += "next: " + next + "\n";
  return text + fmt::format("watching took {:.2f} s of CPU time and {}\n", record.cpu_s,
                            format_size(record.watcher_peak_bytes));
}

}  // namespace modicum
