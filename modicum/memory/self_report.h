// The table in which processes that use Modicum report to the `modicum watch` that runs them: the
// bytes in their ledgers by purpose, their phases and their promises.
//
//   SelfReports    head: pids | SelfReport | SelfReport | ...     made and read by the watcher
//                               ^ claimed and written, without locks, by one process
//
// The table is in shared memory (SharedPages) that the watcher and the processes map; the
// environment variable kWatchVariable has its path. A process may be killed between any two stores,
// and may write anything, so each field is an atomic that the reader validates on its own. Times
// are SteadyClock's, the same in all processes.
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

// A name of at most 127 bytes; longer ones are cut, between characters of UTF-8.
class ReportedName {
 public:
  void set(std::string_view name) noexcept;
  std::string text() const;  // may hold any bytes except NUL

 private:
  static constexpr size_t kWords = 16;
  std::array<std::atomic<uint64_t>, kWords> words_;
};

// The report of one process. All zeros: a report that has not begun.
struct alignas(4096) SelfReport {
  struct Phase {
    std::atomic<uint64_t> number;  // phases are numbered as they begin, from 1; 0: not valid
    std::atomic<int64_t> begin_ns;
    std::atomic<int64_t> end_ns;  // 0: the phase has not ended; -1: the slot is unused
    ReportedName name;
  };
  struct PromisedPhase {
    ReportedName phase;
    std::array<std::atomic<uint64_t>, kPurposes> bytes;
  };
  static constexpr size_t kMaxPhases = 40;  // a new phase overwrites an ended one
  static constexpr size_t kMaxPromised = 8;

  std::atomic<int64_t> begin_ns;  // set last; 0: ignore the rest
  std::atomic<int32_t> rank;      // -1: unknown
  std::atomic<uint32_t> promised_phases;
  std::atomic<uint64_t> baseline_bytes;                     // at `claim`, without the retained heap
  std::atomic<uint64_t> retained_heap_bytes;                // at the last report_heap()
  std::atomic<uint64_t> budget_bytes;                       // budget of the node; 0: none
  std::array<std::atomic<uint64_t>, kPurposes> held_bytes;  // by all ledgers of the process
  std::atomic<uint64_t> phases_begun;
  std::array<PromisedPhase, kMaxPromised> promised;
  std::array<Phase, kMaxPhases> phases;
};
static_assert(sizeof(SelfReport) == 8192);

// The whole table. Pages that no process has claimed are not touched.
struct SelfReports {
  static constexpr size_t kMost = 960;

  // Makes the table in `memory`, which must consist of at least sizeof(SelfReports) zero bytes.
  static SelfReports& make_in(std::span<std::byte> memory);
  // Returns the table in `memory`; nullptr if there is none with this layout (kMagic).
  static SelfReports* find_in(std::span<std::byte> memory) noexcept;
  // Begins the report of process `pid` and returns it; nullptr if all are claimed.
  SelfReport* claim(int pid, uint64_t baseline_bytes) noexcept;

  alignas(4096) std::atomic<uint64_t> magic;
  std::array<std::atomic<int32_t>, kMost> pids;  // 0: free
  std::array<SelfReport, kMost> reports;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// A handle that writes the report of this process. It writes nothing without a watcher, or in a
// process forked from this one. Any thread.
class Reporter {
 public:
  Reporter() = default;
  Reporter(SelfReport& report, int pid) noexcept : report_(&report), pid_(pid) {}

  void add(Purpose purpose, uint64_t bytes) const noexcept;
  void remove(Purpose purpose, uint64_t bytes) const noexcept;
  void set_budget(uint64_t bytes) const noexcept;
  void report_heap() const noexcept;  // reports retained_heap_bytes()
  bool is_on() const noexcept;        // whether there is a report that this process may write
  // Reports this process's rank and, of `promise`, the part for this rank in the first
  // kMaxPromised phases. Replaces an earlier promise.
  void promise(const Promise& promise, int rank) const noexcept;

 private:
  friend class ReportedPhase;
  SelfReport* report_ = nullptr;
  int pid_ = 0;
};

// A phase of this process, from construction to `end` or destruction. Phases may nest. The retained
// heap is reported when a phase begins and ends.
class ReportedPhase {
 public:
  // `name` equals the phase's name in the promise, if the promise has it.
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
