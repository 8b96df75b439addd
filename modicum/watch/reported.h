// Reads the reports of watched processes about themselves. Internal to `watch`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/watch/record.h"

namespace modicum {

// What one process last reported. The bytes are as it wrote them: any number.
struct ReportedMemory {
  std::optional<int> rank;
  uint64_t baseline_bytes = 0;
  uint64_t retained_heap_bytes = 0;
  Footprint held;
};

// Divides the memory that the kernel counts for a process among its owners: `copied_bytes` of it
// are copies since a fork. The sum is `held_bytes` in whole KiB, whatever was reported. Memory that
// is booked and not written yet is not held, and is left out of the largest purpose:
//
//   held 100 MiB, baseline 2, ledger: shards 500, staging 8
//     process 2 | shards 90 | staging 8 | unexplained 0
//
// Once all of the ledger has been written, it comes first: a smaller rest is then of the baseline,
// whose pages are divided among forked children.
class Division {
 public:
  // Of successive readings of one process. `reported` is null without a report.
  OwnedMemory operator()(uint64_t held_bytes, uint64_t copied_bytes,
                         const ReportedMemory* reported);

 private:
  uint64_t written_kib_ = 0;  // the ledger's total, when all of it was
  uint64_t baseline_kib_ = UINT64_MAX;
};

// The reports are input from other processes: any bytes may be in them. One thread.
class ReportedProcesses {
 public:
  static constexpr size_t kMostPhases = 2048;
  static constexpr size_t kMostEnded = 256;

  // Whether a living process still runs the program that has made its report.
  using IsSameProgram = std::function<bool(int pid)>;

  // `begin_ns`: when the command began.
  ReportedProcesses(SelfReports& table, int64_t begin_ns, IsSameProgram is_same_program = {})
      : table_(table), begin_ns_(begin_ns), is_same_program_(std::move(is_same_program)) {}

  // Reads all reports. Those of processes that are not `alive`, in ascending order, are read for
  // the last time, and their places are free again. Those of a program that its process has
  // replaced by another (exec) end, and are no more known.
  void read(int64_t now_ns, std::span<const int> alive);
  // As of now, or as of its end. nullopt if this process has reported nothing.
  std::optional<ReportedMemory> memory_of(int pid) const;
  // The innermost phase now, or when it ended; empty: none. With its promise.
  WatchedPhase phase_of(int pid) const;

  std::optional<uint64_t> budget_bytes() const noexcept { return budget_bytes_; }
  // All phases so far, in the order of their begins; those that last end now.
  std::vector<WatchedPhase> phases(int64_t now_ns) const;

 private:
  struct Open {
    uint64_t number = 0;
    const SelfReport::Phase* from = nullptr;
    WatchedPhase phase;
  };
  struct Known {
    size_t place = 0;  // in the table
    int pid = 0;       // 0: of a program before an exec
    int64_t begin_ns = 0;
    bool has_ended = false;
    ReportedMemory memory;
    uint64_t last_number = 0;  // of its phases
    std::vector<Open> open;    // in the order of their begins
    WatchedPhase last;         // the innermost one when it ended
  };

  Known* find(size_t place) noexcept;
  Known* known_at(size_t place, int pid, bool is_alive, int64_t now_ns);
  bool has_ended(size_t place, int64_t begin_ns) const noexcept;
  const Known* find_pid(int pid) const noexcept;
  void read_report(Known& known, int64_t now_ns);
  void read_phases(Known& known, int64_t now_ns);
  void close(const WatchedPhase& phase);
  void join_phases();
  void end(Known& known, int64_t now_ns);
  double seconds(int64_t at_ns, int64_t now_ns) const noexcept;

  SelfReports& table_;
  const int64_t begin_ns_;
  const IsSameProgram is_same_program_;  // none: always
  std::vector<Known> known_;
  std::vector<WatchedPhase> phases_;  // ended
  std::optional<uint64_t> budget_bytes_;
};

}  // namespace modicum
