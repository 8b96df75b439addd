// Reads the reports that watched processes write about themselves. Internal to `watch`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/probe/probe.h"
#include "modicum/watch/record.h"

namespace modicum {

// The last report of one process, unchecked: any number may have been written.
struct ReportedMemory {
  std::optional<int> rank;
  uint64_t baseline_bytes = 0;
  uint64_t retained_heap_bytes = 0;
  Footprint footprint;
};

// Facts about a process's memory next to its sum.
struct KnownMemory {
  uint64_t copied_bytes = 0;                 // the part that was copied since a fork
  uint64_t shared_bytes = 0;                 // the part in shared memory
  const ReportedMemory* reported = nullptr;  // null: the process has no report
  const MemoryKinds* kinds = nullptr;        // when last read; null: never
};

// Divides the memory that the kernel counts for a process among its owners. The sum is always
// `held_bytes` in whole KiB (at most 4 TiB), whatever the process reports. The ledger also counts
// memory that is booked but not written yet, which the kernel does not count: the largest purposes
// are cut until the sum fits.
//
//   held 100 MiB, baseline 2, ledger: shards 500, staging 8
//     process 2 | shards 90 | staging 8 | the rest 0
//
// Afterwards, once the whole ledger was seen written, the ledger keeps its bytes if the kernel
// counts less than ledger and baseline, and the baseline is cut first. The reason is forks:
// children share the pages of the baseline, and each process counts only a part of them.
//
// The rest is divided by kind. What the process has gained since its kinds were read is of the kind
// that grew most before. A process with a report holds its ledger in large blocks or shared memory,
// and its baseline of each kind is what it held when the report began:
//
//   held 100 MiB, heap 30, blocks 60; baseline 25, of which heap 10; ledger 50
//     process 25 | ledger 50 | heap 20 | blocks 5
class Division {
 public:
  // To be called with successive readings of one process.
  OwnedMemory operator()(uint64_t held_bytes, const KnownMemory& known);

 private:
  // The divided part of the memory, and the size of the other one.
  struct Remainder {
    OwnedMemory owned;
    uint64_t left_kib = 0;

    void take(size_t owner, uint64_t kib) noexcept;
    void take_kinds(const MemoryKinds& kinds, MemoryKind rest) noexcept;
  };

  void follow(const KnownMemory& known);
  void take_reported(const ReportedMemory& reported, Remainder& memory);

  uint64_t written_kib_ = 0;            // the ledger's total when all of it was last written
  uint64_t baseline_kib_ = UINT64_MAX;  // the baseline's part then
  std::optional<MemoryKinds> kinds_;    // when last read
  std::optional<MemoryKinds> kinds_at_report_;
  MemoryKind growing_ = MemoryKind::anonymous;
};

// The phases and memory in all reports. Reports are untrusted: they may hold any bytes. To be
// used by one thread.
class ReportedProcesses {
 public:
  // The most phases that have ended and are kept. If there are more, successive phases of one name
  // in one process are joined; if many remain, the oldest are dropped.
  static constexpr size_t kMaxPhases = 2048;
  // Reports of ended processes. Once there are more than twice as many, the oldest are dropped.
  static constexpr size_t kMaxEnded = 256;

  // Whether a living process still runs the program that began its report.
  using IsSameProgram = std::function<bool(int pid)>;

  // `begin_ns`: the start of the command. Without `is_same_program`, an exec is noticed only when
  // the next program begins its report.
  ReportedProcesses(SelfReports& table, int64_t begin_ns, IsSameProgram is_same_program = {})
      : table_(table), begin_ns_(begin_ns), is_same_program_(std::move(is_same_program)) {}

  // Reads all reports. `alive`: the pids of the living processes that are known, ascending;
  // `is_alive` is asked about others, which may have begun since (without it they have ended). The
  // report of a process that has ended is read for the last time, and its place in the table
  // becomes free. If a process has replaced its program (exec), the earlier program's phases end
  // and its memory is forgotten.
  using IsAlive = std::function<bool(int pid)>;
  void read(int64_t now_ns, std::span<const int> alive, const IsAlive& is_alive = {});
  // The report of a process now, or the last one before it ended. nullopt if none is known.
  std::optional<ReportedMemory> memory_of(int pid) const;
  // The innermost phase of a process now, or when the process ended; its name is empty if there is
  // none.
  WatchedPhase phase_of(int pid) const;

  std::optional<uint64_t> budget_bytes() const noexcept { return budget_bytes_; }
  // The phases so far (see kMaxPhases), sorted by begin. Phases that have not ended get `now_ns`
  // as their end.
  std::vector<WatchedPhase> phases(int64_t now_ns) const;

 private:
  struct OpenPhase {
    uint64_t number = 0;                      // SelfReport::Phase::number
    const SelfReport::Phase* from = nullptr;  // in the table
    WatchedPhase phase;
  };
  struct KnownProcess {
    size_t place = 0;  // index in the table
    int pid = 0;       // 0: the process has replaced the program by exec
    int64_t begin_ns = 0;
    bool has_ended = false;
    ReportedMemory memory;
    uint64_t last_number = 0;     // the highest number of a phase that was read
    std::vector<OpenPhase> open;  // phases that have not ended, in the order of their begins
    WatchedPhase last;            // the innermost phase when the process ended
  };

  KnownProcess* find(size_t place) noexcept;
  KnownProcess* known_at(size_t place, int pid, bool is_alive, int64_t now_ns);
  bool has_ended(size_t place, int64_t begin_ns) const noexcept;
  const KnownProcess* find_pid(int pid) const noexcept;
  void read_report(KnownProcess& known, int64_t now_ns);
  void read_phases(KnownProcess& known, int64_t now_ns);
  void close(const WatchedPhase& phase);
  void join_phases();
  void end(KnownProcess& known, int64_t now_ns);
  double seconds(int64_t at_ns, int64_t now_ns) const noexcept;

  SelfReports& table_;
  const int64_t begin_ns_;
  const IsSameProgram is_same_program_;
  std::vector<KnownProcess> known_;
  std::vector<WatchedPhase> phases_;  // those that have ended
  std::optional<uint64_t> budget_bytes_;
};

}  // namespace modicum
