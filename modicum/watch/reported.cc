#include "modicum/watch/reported.h"

#include <algorithm>
#include <map>
#include <utility>

#include "modicum/base/base.h"

namespace modicum {
namespace {

Footprint footprint_of(std::span<const std::atomic<uint64_t>, kPurposes> from) noexcept {
  Footprint footprint;
  for (size_t p = 0; p < kPurposes; ++p) footprint.bytes[p] = from[p].load();
  return footprint;
}

// The memory of a process's ledgers that its Pss counts, in KiB. Pss counts neither page tables nor
// the copies that forked children hold; the baseline (`process`) is divided separately.
Footprint ledger_kib(Footprint footprint) noexcept {
  footprint[Purpose::process] = footprint[Purpose::page_tables] = footprint[Purpose::fork] = 0;
  for (uint64_t& bytes : footprint.bytes) bytes /= kKiB;
  return footprint;
}

ReportedMemory memory_in(const SelfReport& report) {
  ReportedMemory memory{.baseline_bytes = report.baseline_bytes.load(),
                        .retained_heap_bytes = report.retained_heap_bytes.load(),
                        .footprint = footprint_of(report.held_bytes)};
  if (const int rank = report.rank.load(); rank >= 0) memory.rank = rank;
  return memory;
}

// WatchedPhase::promised_bytes of a phase.
std::optional<uint64_t> promised_in(const SelfReport& report, const std::string& phase) {
  const size_t count = std::min<size_t>(report.promised_phases.load(), SelfReport::kMaxPromised);
  for (size_t i = 0; i < count; ++i) {
    if (report.promised[i].phase.text() != phase) continue;
    Footprint footprint = footprint_of(report.promised[i].bytes);
    footprint[Purpose::page_tables] = footprint[Purpose::fork] = 0;
    return footprint.total();
  }
  return std::nullopt;
}

// The private kind that has grown most.
MemoryKind grown_most(const MemoryKinds& before, const MemoryKinds& now) noexcept {
  MemoryKind most = MemoryKind::anonymous;
  uint64_t most_bytes = 0;
  for (size_t k = 0; k < kMemoryKinds; ++k) {
    const auto kind = static_cast<MemoryKind>(k);
    const uint64_t bytes = now[kind] - std::min(now[kind], before[kind]);
    if (kind == MemoryKind::shared_memory || bytes <= most_bytes) continue;
    most = kind;
    most_bytes = bytes;
  }
  return most;
}

// The bytes of each kind outside of baseline, ledger and freed blocks, except for large blocks,
// which are the rest. Shared memory is outside of the ledger only if private memory is large enough
// for the ledger.
MemoryKinds outside_ledger(const MemoryKinds& now, const MemoryKinds& before,
                           const ReportedMemory& reported) noexcept {
  MemoryKinds outside;
  for (size_t k = 0; k < kMemoryKinds; ++k) {
    outside.bytes[k] = now.bytes[k] - std::min(now.bytes[k], before.bytes[k]);
  }
  outside[MemoryKind::anonymous] = 0;
  const uint64_t ledger = ledger_kib(reported.footprint).total();
  if (ledger > (now.total() - now[MemoryKind::shared_memory]) / kKiB) {
    outside[MemoryKind::shared_memory] = 0;
  }
  uint64_t freed = reported.retained_heap_bytes;
  for (const MemoryKind kind : {MemoryKind::malloc_heap, MemoryKind::malloc_arenas}) {
    const uint64_t cut = std::min(freed, outside[kind]);
    outside[kind] -= cut;
    freed -= cut;
  }
  return outside;
}

}  // namespace

void Division::Remainder::take(size_t owner, uint64_t kib) noexcept {
  const uint64_t taken = std::min(left_kib, kib);
  owned.kib[owner] += static_cast<uint32_t>(taken);
  left_kib -= taken;
}

// In proportion if there is less than `kinds`; `rest` gets the remainder.
void Division::Remainder::take_kinds(const MemoryKinds& kinds, MemoryKind rest) noexcept {
  const uint64_t all_kib = std::max<uint64_t>(kinds.total() / kKiB, 1);
  const double share = std::min(1.0, static_cast<double>(left_kib) / static_cast<double>(all_kib));
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    const uint64_t kib = kinds.bytes[kind] / kKiB;
    take(owner_of(static_cast<MemoryKind>(kind)),
         static_cast<uint64_t>(static_cast<double>(kib) * share));
  }
  take(owner_of(rest), left_kib);
}

void Division::follow(const KnownMemory& known) {
  if (known.reported == nullptr) {
    written_kib_ = 0;  // a later report comes from another program
    baseline_kib_ = UINT64_MAX;
    kinds_at_report_.reset();
  }
  if (known.kinds == nullptr) return;
  if (kinds_ && *kinds_ != *known.kinds) growing_ = grown_most(*kinds_, *known.kinds);
  kinds_ = *known.kinds;
  if (known.reported != nullptr && !kinds_at_report_) kinds_at_report_ = *kinds_;
}

// Divides the baseline and the ledger of a report.
void Division::take_reported(const ReportedMemory& reported, Remainder& memory) {
  constexpr auto kProcess = static_cast<size_t>(Purpose::process);
  Footprint ledger = ledger_kib(reported.footprint);
  const uint64_t baseline_kib = reported.baseline_bytes / kKiB;
  const uint64_t base_kib = std::min(baseline_kib_, baseline_kib);
  // If the kernel counts this much, all pages of the ledger have been written.
  if (memory.left_kib >= base_kib + ledger.total()) written_kib_ = ledger.total();
  const bool is_written = ledger.total() <= written_kib_;
  if (!is_written) memory.take(kProcess, base_kib);
  while (ledger.total() > memory.left_kib) {
    uint64_t& largest = *std::max_element(ledger.bytes.begin(), ledger.bytes.end());
    largest -= std::min(largest, ledger.total() - memory.left_kib);
  }
  for (size_t p = 0; p < kPurposes; ++p) {
    if (ledger.bytes[p] > 0) memory.take(p, ledger.bytes[p]);
  }
  if (!is_written) return;
  written_kib_ = ledger.total();
  memory.take(kProcess, baseline_kib);
  baseline_kib_ = memory.owned.kib[kProcess];
}

OwnedMemory Division::operator()(uint64_t held_bytes, const KnownMemory& known) {
  follow(known);
  Remainder memory{.left_kib = std::min<uint64_t>(held_bytes / kKiB, UINT32_MAX)};
  const uint64_t copied_kib = known.copied_bytes / kKiB;
  if (known.reported == nullptr) {
    memory.take(owner_of(MemoryKind::shared_memory), known.shared_bytes / kKiB);
    memory.take(kCopiesSinceFork, copied_kib);
    if (kinds_) {
      MemoryKinds kinds = *kinds_;
      kinds[MemoryKind::shared_memory] = 0;
      memory.take_kinds(kinds, growing_);
    }
    memory.take(static_cast<size_t>(WatchOwner::unattributed), memory.left_kib);
    return memory.owned;
  }
  take_reported(*known.reported, memory);
  memory.take(kCopiesSinceFork, copied_kib);
  memory.take(static_cast<size_t>(WatchOwner::retained_heap),
              known.reported->retained_heap_bytes / kKiB);
  if (kinds_at_report_) {
    memory.take_kinds(outside_ledger(*kinds_, *kinds_at_report_, *known.reported),
                      MemoryKind::anonymous);
  }
  memory.take(static_cast<size_t>(WatchOwner::unexplained), memory.left_kib);
  return memory.owned;
}

double ReportedProcesses::seconds(int64_t at_ns, int64_t now_ns) const noexcept {
  const int64_t at = std::clamp(at_ns, begin_ns_, std::max(begin_ns_, now_ns));
  return static_cast<double>(at - begin_ns_) / kNsPerSecond;
}

ReportedProcesses::KnownProcess* ReportedProcesses::find(size_t place) noexcept {
  const auto at = std::find_if(known_.begin(), known_.end(), [place](const KnownProcess& process) {
    return process.place == place && !process.has_ended;
  });
  return at == known_.end() ? nullptr : &*at;
}

// The latest report, since pids are reused.
const ReportedProcesses::KnownProcess* ReportedProcesses::find_pid(int pid) const noexcept {
  const auto at = std::find_if(known_.rbegin(), known_.rend(),
                               [pid](const KnownProcess& process) { return process.pid == pid; });
  return at == known_.rend() ? nullptr : &*at;
}

bool ReportedProcesses::has_ended(size_t place, int64_t begin_ns) const noexcept {
  return std::any_of(known_.begin(), known_.end(), [&](const KnownProcess& process) {
    return process.place == place && process.begin_ns == begin_ns && process.has_ended;
  });
}

// The report of process `pid` at `place`; null before it has begun. Adds it to known_ if it is new.
ReportedProcesses::KnownProcess* ReportedProcesses::known_at(size_t place, int pid, bool is_alive,
                                                             int64_t now_ns) {
  const int64_t began_ns = table_.reports[place].begin_ns.load();
  KnownProcess* const known = find(place);
  if (known == nullptr && (began_ns == 0 || has_ended(place, began_ns))) return nullptr;
  const bool is_of_program = !is_alive || !is_same_program_ || is_same_program_(pid);
  if (known != nullptr && known->pid == pid && known->begin_ns == began_ns && is_of_program) {
    return known;
  }
  if (known != nullptr) {  // the report of another process, or of this one before an exec
    end(*known, now_ns);
    if (known->pid == pid) known->pid = 0;
  }
  if (began_ns == 0 || !is_of_program) return nullptr;
  return &known_.emplace_back(KnownProcess{.place = place, .pid = pid, .begin_ns = began_ns});
}

void ReportedProcesses::read(int64_t now_ns, std::span<const int> alive, const IsAlive& is_alive) {
  for (size_t place = 0; place < SelfReports::kMost; ++place) {
    int pid = table_.pids[place].load();
    if (pid == 0) continue;
    const bool is_living =
        std::binary_search(alive.begin(), alive.end(), pid) || (is_alive && is_alive(pid));
    KnownProcess* const known = known_at(place, pid, is_living, now_ns);
    if (known != nullptr) read_report(*known, now_ns);
    if (is_living) continue;
    if (known != nullptr) end(*known, now_ns);
    // Unless another process has claimed the place meanwhile.
    table_.pids[place].compare_exchange_strong(pid, 0);
  }
  const auto ended = std::count_if(known_.begin(), known_.end(),
                                   [](const KnownProcess& process) { return process.has_ended; });
  if (static_cast<size_t>(ended) > 2 * kMaxEnded) {
    int64_t extra = ended - static_cast<int64_t>(kMaxEnded);
    std::erase_if(known_,
                  [&](const KnownProcess& process) { return process.has_ended && extra-- > 0; });
  }
}

void ReportedProcesses::read_report(KnownProcess& known, int64_t now_ns) {
  const SelfReport& report = table_.reports[known.place];
  known.memory = memory_in(report);
  if (const uint64_t budget = report.budget_bytes.load(); budget != 0) {
    budget_bytes_ = std::max(budget_bytes_.value_or(0), budget);
  }
  read_phases(known, now_ns);
}

void ReportedProcesses::read_phases(KnownProcess& known, int64_t now_ns) {
  const SelfReport& report = table_.reports[known.place];
  std::erase_if(known.open, [&](OpenPhase& open) {
    // If a later phase has taken its place in the table, it ended before the later one began.
    const bool is_here = open.from->number.load() == open.number;
    const int64_t end_ns = is_here ? open.from->end_ns.load() : open.from->begin_ns.load();
    const bool is_over = !is_here || end_ns != 0;
    open.phase.rank = known.memory.rank;
    open.phase.end_s = std::max(open.phase.begin_s, seconds(is_over ? end_ns : now_ns, now_ns));
    if (is_over) close(open.phase);
    return is_over;
  });
  std::vector<OpenPhase> begun;
  for (const SelfReport::Phase& from : report.phases) {
    const uint64_t number = from.number.load();
    if (number <= known.last_number) continue;
    const int64_t end_ns = from.end_ns.load();
    const std::string name = from.name.text();
    OpenPhase open{.number = number,
                   .from = &from,
                   .phase = {.pid = known.pid,
                             .rank = known.memory.rank,
                             .name = printable(name),
                             .begin_s = seconds(from.begin_ns.load(), now_ns),
                             .end_s = seconds(end_ns == 0 ? now_ns : end_ns, now_ns),
                             .promised_bytes = promised_in(report, name)}};
    open.phase.end_s = std::max(open.phase.begin_s, open.phase.end_s);
    // Unchanged: no later phase has overwritten the fields meanwhile.
    if (from.number.load() == number) begun.push_back(std::move(open));
  }
  std::sort(begun.begin(), begun.end(), [](auto& a, auto& b) { return a.number < b.number; });
  for (OpenPhase& open : begun) {
    known.last_number = open.number;
    if (open.from->end_ns.load() == 0) {
      known.open.push_back(std::move(open));
    } else {
      close(open.phase);
    }
  }
}

void ReportedProcesses::close(const WatchedPhase& phase) {
  phases_.push_back(phase);
  if (phases_.size() > kMaxPhases) join_phases();
}

// Joins successive phases of one name in one process. If more than half of kMaxPhases remain,
// drops the oldest.
void ReportedProcesses::join_phases() {
  std::map<int, size_t> last;  // by pid
  std::vector<WatchedPhase> joined;
  for (WatchedPhase& phase : phases_) {
    const auto before = last.find(phase.pid);
    if (before != last.end() && joined[before->second].name == phase.name) {
      joined[before->second].end_s = phase.end_s;
      continue;
    }
    last[phase.pid] = joined.size();
    joined.push_back(std::move(phase));
  }
  phases_ = std::move(joined);
  if (phases_.size() <= kMaxPhases / 2) return;
  phases_.erase(phases_.begin(), phases_.end() - static_cast<ptrdiff_t>(kMaxPhases / 2));
}

void ReportedProcesses::end(KnownProcess& known, int64_t now_ns) {
  known.has_ended = true;
  if (!known.open.empty()) known.last = known.open.back().phase;
  for (OpenPhase& open : known.open) {
    open.phase.end_s = seconds(now_ns, now_ns);
    close(open.phase);
  }
  known.open.clear();
}

std::optional<ReportedMemory> ReportedProcesses::memory_of(int pid) const {
  const KnownProcess* const known = find_pid(pid);
  if (known == nullptr) return std::nullopt;
  return known->has_ended ? known->memory : memory_in(table_.reports[known->place]);
}

WatchedPhase ReportedProcesses::phase_of(int pid) const {
  const KnownProcess* const known = find_pid(pid);
  if (known == nullptr) return {};
  if (known->has_ended || known->open.empty()) return known->last;
  return known->open.back().phase;
}

std::vector<WatchedPhase> ReportedProcesses::phases(int64_t now_ns) const {
  std::vector<WatchedPhase> all = phases_;
  for (const KnownProcess& known : known_) {
    for (const OpenPhase& open : known.open) {
      all.push_back(open.phase);
      all.back().end_s = seconds(now_ns, now_ns);
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const WatchedPhase& a, const WatchedPhase& b) {
    return a.begin_s < b.begin_s;
  });
  return all;
}

}  // namespace modicum
