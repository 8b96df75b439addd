#include "modicum/report/members.h"

#include <fmt/format.h>

#include <algorithm>

namespace modicum {
namespace {

void rank_object(JsonWriter& out, const Promise& promise, const RankOutcome& rank) {
  out.begin_object().member("rank", rank.rank).member("pid", rank.pid);
  out.member("node", promise.node_of_rank[static_cast<size_t>(rank.rank)]);
  out.member("promised_bytes", promise.rank_peak_bytes(rank.rank));
  out.member("ledger_peak_bytes", rank.ledger_peak_bytes);
  out.member("kernel_peak_bytes", rank.kernel_peak_bytes);
  out.member("baseline_bytes", rank.baseline_bytes);
  out.member("unexplained_bytes", rank.unexplained_bytes());
  out.member("page_cache_peak_bytes", rank.page_cache_peak_bytes);
  out.member("storage_read_bytes", rank.storage_read_bytes);
  out.member("exchanged_bytes", rank.exchanged_bytes);
  out.end_object();
}

uint64_t node_kernel_peak(const PromiseAndOutcomes& outcomes, int node) {
  uint64_t sum = outcomes.launcher.with_ranks;
  for (const RankOutcome& rank : outcomes.ranks) {
    if (outcomes.promise.is_on(node, rank.rank)) sum += rank.kernel_peak_bytes;
  }
  return std::max(sum, outcomes.launcher.alone);
}

// RankOutcome::unexplained_bytes in words. It is negative if other processes have begun to share
// pages that the baseline counts in full.
std::string unexplained_text(int64_t bytes) {
  return bytes < 0 ? "0 B (shared pages)" : format_size(static_cast<uint64_t>(bytes));
}

}  // namespace

void checkpoint_members(JsonWriter& out, const CheckpointFacts& checkpoint) {
  out.key("checkpoint").begin_object();
  out.member("bytes", checkpoint.bytes);
  out.member("tensors", checkpoint.tensors);
  out.member("files", checkpoint.files);
  out.end_object();
  revision_member(out, checkpoint.hub);
  warnings_member(out, checkpoint.warnings);
}

void revision_member(JsonWriter& out, const std::optional<HubModel>& hub) {
  if (hub) out.member("revision", hub->revision);
}

std::string name_of(const HubModel& model) {
  return fmt::format("{}@{}", model.name, model.revision);
}

void warnings_member(JsonWriter& out, std::span<const std::string> warnings) {
  out.key("warnings").begin_array();
  for (const std::string& warning : warnings) out.value(warning);
  out.end_array();
}

void damaged_member(JsonWriter& out, std::span<const DamagedCheckpoint> damaged) {
  out.key("damaged").begin_array();
  for (const DamagedCheckpoint& step : damaged) {
    out.begin_object().member("step", step.step).member("path", step.path);
    out.member("reason", step.reason).member("bytes", step.bytes).end_object();
  }
  out.end_array();
}

std::string warnings_text(std::span<const std::string> warnings) {
  std::string text;
  for (const std::string& warning : warnings) {
    text += fmt::format("warning: {}\n", printable(warning));
  }
  return text;
}

void state_digest_member(JsonWriter& out, const std::optional<uint64_t>& digest) {
  std::optional<std::string> text;
  if (digest) text = digest_text(*digest);
  out.member("state_digest", text);
}

void compared_members(JsonWriter& out, const ComparedValues& compared) {
  out.member("compared_bytes", compared.bytes).key("not_compared").begin_array();
  for (const std::string& name : compared.not_compared) out.value(name);
  out.end_array();
}

std::string compared_text(const ComparedValues& compared) {
  if (compared.bytes == 0 && compared.not_compared.empty()) return "";
  std::string text =
      fmt::format("compared with the checkpoint's record: {} equal", format_size(compared.bytes));
  if (!compared.not_compared.empty()) {
    text += fmt::format("; not or partly compared: {}, the first is {}",
                        counted(compared.not_compared.size(), "tensor"),
                        printable(compared.not_compared.front()));
  }
  return text + "\n";
}

void budget_member(JsonWriter& out, const std::optional<Budget>& budget) {
  out.key("budget");
  if (!budget) {
    out.null();
    return;
  }
  out.begin_object().member("bytes", budget->bytes).member("source", budget->source).end_object();
}

std::string budget_text(const std::optional<Budget>& budget) {
  if (!budget) return "";
  return fmt::format("\nbudget {} per node ({})\n", format_size(budget->bytes), budget->source);
}

void outcome_members(JsonWriter& out, const PromiseAndOutcomes& outcomes) {
  out.key("nodes").begin_array();
  for (int node = 0; node < outcomes.promise.nodes(); ++node) {
    const uint64_t promised = outcomes.promise.node_peak_bytes(node);
    out.begin_object().member("node", node).member("promised_bytes", promised);
    out.member("peak_bytes", promised);  // the key of the promised peak in documents of `plan`
    out.member("kernel_peak_bytes", node_kernel_peak(outcomes, node));
    if (outcomes.cgroup_peak_bytes) out.member("cgroup_peak_bytes", *outcomes.cgroup_peak_bytes);
    out.member("launcher_bytes", outcomes.launcher.with_ranks);
    out.end_object();
  }
  out.end_array().key("ranks").begin_array();
  for (const RankOutcome& rank : outcomes.ranks) rank_object(out, outcomes.promise, rank);
  out.end_array();
}

void phases_member(JsonWriter& out, std::span<const PhaseReport> phases,
                   const LauncherMemory& launcher) {
  out.key("phases").begin_array();
  for (const PhaseReport& phase : phases) {
    out.begin_object().member("phase", phase.name);
    outcome_members(out, {phase.promise, phase.ranks, launcher});
    out.end_object();
  }
  out.end_array();
}

std::string cgroup_text(uint64_t peak_bytes) {
  return fmt::format("cgroup   {} at most at one time, page cache included\n",
                     format_size(peak_bytes));
}

std::string outcome_text(const PromiseAndOutcomes& outcomes) {
  static constexpr std::string_view kRow = "{:<8} {:>12} {:>12} {:>12} {:>19} {:>12}\n";
  std::string text =
      fmt::format(kRow, "", "predicted", "charged", "measured", "not explained", "page cache");
  const auto line = [&text](const std::string& who, uint64_t predicted, const RankOutcome& has,
                            const std::string& unexplained) {
    const auto size_or_nothing = [](uint64_t size) { return size == 0 ? "" : format_size(size); };
    text += fmt::format(kRow, who, format_size(predicted), size_or_nothing(has.ledger_peak_bytes),
                        format_size(has.kernel_peak_bytes), unexplained,
                        size_or_nothing(has.page_cache_peak_bytes));
  };
  for (const RankOutcome& rank : outcomes.ranks) {
    line(fmt::format("rank {}", rank.rank), outcomes.promise.rank_peak_bytes(rank.rank), rank,
         unexplained_text(rank.unexplained_bytes()));
  }
  for (int node = 0; node < outcomes.promise.nodes(); ++node) {
    line(fmt::format("node {}", node), outcomes.promise.node_peak_bytes(node),
         {.kernel_peak_bytes = node_kernel_peak(outcomes, node)}, "");
  }
  if (outcomes.cgroup_peak_bytes) {
    text += cgroup_text(*outcomes.cgroup_peak_bytes);
  }
  return text;
}

}  // namespace modicum
