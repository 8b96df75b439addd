// What a process that uses Modicum reports about itself to the `modicum watch` that runs it: the
// bytes of its ledgers by purpose, its phases and its promise.
//
//   SelfReports    head: pids | SelfReport | SelfReport | ...     made and read by the watcher
//                                   ^ claimed, and written without locks, by one process
//
// The table lies in memory that all of them map; its path is in kWatchVariable. A process may be
// killed between any two stores, and anything may be written there, so each field is an atomic that
// the reader validates by itself. Times are those of SteadyClock, the same in all processes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "modicum/spec/spec.h"

namespace modicum {

constexpr const char* kWatchVariable = "MODICUM_WATCH";
constexpr size_t kPurposes = static_cast<size_t>(Purpose::count);

// A name of at most 31 bytes; longer ones are truncated.
class ReportedName {
 public:
  void set(std::string_view name) noexcept;
  std::string text() const;  // any bytes but NUL

 private:
  static constexpr size_t kWords = 4;
  std::array<std::atomic<uint64_t>, kWords> words_;
};

// One process. Zeros are a report that has not begun.
struct alignas(4096) SelfReport {
  struct Phase {
    std::atomic<uint64_t> number;  // in the order of their begins, from 1; 0 while it is written
    std::atomic<int64_t> begin_ns;
    std::atomic<int64_t> end_ns;  // 0: it lasts
    ReportedName name;
  };
  struct Promised {
    ReportedName phase;
    std::array<std::atomic<uint64_t>, kPurposes> bytes;
  };
  static constexpr size_t kMostPhases = 40;  // the last ones, and all that last
  static constexpr size_t kMostPromised = 8;

  std::atomic<int64_t> begin_ns;  // set last; 0: ignore the rest
  std::atomic<int32_t> rank;      // -1: unknown
  std::atomic<uint32_t> promised_phases;
  std::atomic<uint64_t> baseline_bytes;       // held by the process before, less its retained heap
  std::atomic<uint64_t> retained_heap_bytes;  // when last asked
  std::atomic<uint64_t> budget_bytes;         // of the node; 0: none
  std::array<std::atomic<uint64_t>, kPurposes> held;  // by all ledgers of the process
  std::atomic<uint64_t> phases_begun;
  std::array<Promised, kMostPromised> promised;
  std::array<Phase, kMostPhases> phases;
};
static_assert(sizeof(SelfReport) == 4096);

// The whole table. Pages that no process has claimed are not touched.
struct SelfReports {
  static constexpr size_t kMost = 960;

  // The table in `memory`, of sizeof(SelfReports) zeros.
  static SelfReports& make_in(std::span<std::byte> memory);
  // Null unless the same version of Modicum has made a table in `memory`.
  static SelfReports* find_in(std::span<std::byte> memory) noexcept;
  // The report of process `pid`, begun anew; null if all are claimed. `baseline_bytes` as below.
  SelfReport* claim(int pid, uint64_t baseline_bytes) noexcept;

  alignas(4096) std::atomic<uint64_t> magic;
  std::array<std::atomic<int32_t>, kMost> pids;  // 0: free
  std::array<SelfReport, kMost> reports;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Writes the report of this process: a handle, which reports nothing without a watcher, and in
// processes that are forked from this one. Any thread.
class Reporter {
 public:
  Reporter() = default;
  Reporter(SelfReport& report, int pid) noexcept : report_(&report), pid_(pid) {}

  void add(Purpose purpose, uint64_t bytes) const noexcept;
  void remove(Purpose purpose, uint64_t bytes) const noexcept;
  void set_budget(uint64_t bytes) const noexcept;
  void report_heap() const noexcept;  // retained_heap_bytes() of now
  bool is_on() const noexcept;        // whether it reports
  // What `rank`, which this process is, has promised for each phase. Replaces an earlier promise.
  void promise(const Promise& promise, int rank) const noexcept;

 private:
  friend class ReportedPhase;
  SelfReport* report_ = nullptr;
  int pid_ = 0;
};

// A phase of this process from construction to `end`, or destruction. Phases may nest. At both ends
// the retained heap is reported.
class ReportedPhase {
 public:
  // `name`: as in the promise, where that has the phase.
  ReportedPhase(const Reporter& reporter, std::string_view name) noexcept;
  ~ReportedPhase() { end(); }
  ReportedPhase(const ReportedPhase&) = delete;
  ReportedPhase& operator=(const ReportedPhase&) = delete;
  void end() noexcept;

 private:
  const Reporter reporter_;
  SelfReport::Phase* phase_ = nullptr;
};

}  // namespace modicum
