// Samples the memory of a process tree at a bounded CPU cost. Internal to `watch`.
//
// A sample reads the status of each process (about 20 us), which counts a shared page in full for
// each of its processes. Pss divides shared pages, but costs 10 to 50 ms per GiB, so it is rarely
// read except near new peaks. Between these exact readings, the estimate for a process is its last
// Pss plus the private memory (RssAnon) that it has gained since; of shared memory, at most what it
// maps now (RssShmem). A child that is still in its parent's memory (vfork, posix_spawn) counts as
// nothing. With a parent and its forked child:
//
//                 at first   allocates   forks      the parent writes
//   RssAnon            100         160   160, 160            160, 160
//   estimate           100         160   160,   0            160,   0
//   Pss                100         160    80,  80            160, 160
//
// The sum of the estimates is rarely too high, since RssAnon grows by new pages only. It is too
// high after a fork, where a child of at most 32 MiB is read exactly and its parent is not yet; and
// where Pss can't be read and RSS replaces it. A copy-on-write leaves RssAnon unchanged, so the
// estimate is too low; the page faults that it costs show that an exact reading is needed, and
// bound what may be held until then (so does RssAnon of a large process that has not been read).
// The more CPU time is owed, the longer that is; an exact reading stops between two processes when
// too much is owed, and takes effect when all are read. A cgroup counts each page once: that of the
// command alone (--limit) has the copies to the byte, that of the watching process is another
// bound.
//
// The kinds of a process's memory (read_memory_kinds) are read when it has grown or shrunk, and
// after 10 s if it has changed at all; the process that has changed most comes first, while the
// allowed CPU time lasts. Above half of the limit they are read on credit: a kill may follow, and
// `growth` names the owner from them.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/probe/probe.h"
#include "modicum/watch/cpu_allowance.h"
#include "modicum/watch/record.h"
#include "modicum/watch/reported.h"
#include "modicum/watch/timeline.h"

namespace modicum {

struct SamplerOptions {
  int root_pid = 0;                   // its descendants are sampled, not the process itself
  std::string root;                   // prefix of /proc, for tests
  double duty = 0.005;                // the share of one core that sampling may use
  std::function<int64_t()> cpu_ns;    // returns the CPU time of this process so far
  std::optional<MemoryCgroup> cage;   // the cgroup that holds the command only, if there is one
  std::optional<MemoryCgroup> group;  // one that holds the command among others
  uint64_t limit_bytes = 0;           // limit of `cage`; 0: none
  uint64_t forked_rss_bytes = 0;      // VmHWM of the command before exec; its ru_maxrss includes it
  SelfReports* reports = nullptr;     // the table of the processes' own reports; null: none
  ReportedProcesses::IsSameProgram is_same_program;
};

// One thread.
class TreeSampler {
 public:
  static constexpr int64_t kShortestPauseNs = 20 * kNsPerMs;  // except near the limit
  static constexpr int64_t kPauseNearLimitNs = 4 * kNsPerMs;
  static constexpr size_t kMaxShares = 64;  // in one sample
  // This many processes get a WatchedProcess when they are found. Later ones get one when they hold
  // more than 1/64 of the peak, up to 8 times as many in all; the others count in the sums only.
  static constexpr size_t kMaxProcesses = 512;

  TreeSampler(Clock& clock, SamplerOptions options);

  void sample();
  // The pause before the next sample. It is so long that the samples, without their exact readings,
  // use at most half of the duty, or 1 % of one core while much of the allowed CPU time is unused,
  // as at the beginning. Above half of the limit the pause is at most kPauseNearLimitNs, whatever a
  // sample costs, until the allowed CPU time is nearly used up.
  int64_t pause_ns() const noexcept { return pause_ns_; }

  // The processes that were alive at the last sample.
  std::vector<int> alive() const;
  // Whether a process had no memory any more, but had not ended, at the last sample.
  bool is_ending() const noexcept;
  // The memory of a process in the last recent sample in which it held any, else its VmHWM when it
  // was last seen; 0 for an unknown process.
  uint64_t last_held(int pid) const;
  // The memory of all other processes in the last sample.
  uint64_t held_by_others(int pid) const;
  const WatchedProcess* find(int pid) const;  // the latest with this pid; null if there is none
  // The process that grew most during the `within_ns` before the last sample in which process `pid`
  // held memory; before the last sample of all, if it is in no recent one.
  struct Growth {
    int pid = 0;
    uint64_t bytes = 0;
    double seconds = 0;
    size_t owner = 0;  // the owner of its memory that grew most
  };
  Growth growth(int64_t within_ns, int pid) const;
  // As ReportedProcesses::phase_of, after reading the reports.
  WatchedPhase phase_of(int pid);
  const WatchSample& last() const noexcept { return recent_.back(); }

  // Adds a process that was killed before any sample. Its rank is that of its own report.
  // `held_bytes`: its memory when it was killed.
  void add_unseen(int pid, const std::string& name, uint64_t held_bytes);

  // Adds a sample at which process `pid` was killed: as the last one, but with what the process
  // held in its own last sample and has gained until its RssAnon + RssShmem were `rss_bytes`
  // (nullopt: nothing is known). So pages that it shares count as in the samples. Returns its
  // memory.
  uint64_t add_kill(int pid, std::optional<uint64_t> rss_bytes);

  // Notes that a process was waited for. `peak_rss_bytes`: its ru_maxrss, the highest VmHWM of it
  // or of one of its descendants that have ended.
  void note_end(int pid, uint64_t peak_rss_bytes) noexcept;

  // Moves the results into `record`: processes and peaks.
  void finish(WatchRecord& record);

 private:
  // The estimate of a process's memory after its Pss was read.
  struct Estimate {
    uint64_t pss_anon = 0;   // at the reading, less the private bytes freed since
    uint64_t pss_shmem = 0;  // at the reading
    uint64_t anon_then = 0;  // the lowest RssAnon since the reading

    void note_freed(uint64_t rss_anon) noexcept {
      if (rss_anon >= anon_then) return;
      pss_anon -= std::min(pss_anon, anon_then - rss_anon);
      anon_then = rss_anon;
    }
  };
  struct TrackedProcess {
    int pid = 0;
    std::optional<size_t> process;  // index in processes_; none: it has no record
    bool may_be_in_parents = true;  // is_in_parents_memory when last asked
    ProcessStatus status;
    Estimate estimate;
    bool is_unread = false;        // large when it was found, and Pss was never read
    bool is_due = false;           // still to be read by the exact reading that has begun
    std::optional<Estimate> next;  // read by it; replaces `estimate` when all are read
    uint64_t faults_at_next = 0;   // faults_since then
    uint64_t faults = 0;           // minor page faults, when last read; 0: not yet
    uint64_t faults_since = 0;     // minor page faults since Pss was last read
    uint64_t copied_bytes = 0;     // copied since a fork (ForkCopies), when last read
    Division division;             // its state between samples
    std::optional<MemoryKinds> kinds;
    uint64_t rss_at_kinds = 0;            // rss_bytes() when `kinds` were read, or could not be
    int64_t kinds_at_ns = INT64_MIN / 2;  // long ago: never
    int64_t kinds_cost_ns = kNsPerMs;     // of the last reading
    uint64_t rss_when_held = 0;  // rss_bytes() in the last sample in which it held any memory
    int rank_reads = 0;          // readings of its environment since its name last changed

    uint64_t rss_bytes() const noexcept { return status.rss_anon + status.rss_shmem; }
    uint64_t mapped_bytes() const noexcept { return rss_bytes() + status.rss_file; }
    uint64_t anon_bytes() const noexcept {  // the estimate of private memory
      return estimate.pss_anon + (status.rss_anon - std::min(status.rss_anon, estimate.anon_then));
    }
    uint64_t held_bytes() const noexcept {  // the estimate
      return anon_bytes() + std::min(estimate.pss_shmem, status.rss_shmem);
    }
  };

  static constexpr double kAmpleNs = 50 * kNsPerMs;  // left of the allowed CPU time
  static constexpr uint64_t kFaultsOfCopying = 256;  // 1 MiB of copied pages

  // What a sample reads after the statuses of all processes.
  enum class Reading { status, pss, copies };  // status: nothing more
  // What is still to be read since Pss was last read. new_copies: Pss was read because pages had
  // been copied.
  enum class Owed { nothing, copies, new_copies };

  void discover();
  void add(int pid);
  std::optional<ProcessStatus> read_status_of(TrackedProcess& tracked);
  void read_statuses();
  void take_status(TrackedProcess& tracked, ProcessStatus status);
  void read_reports(int64_t now);
  void read_rank(TrackedProcess& tracked);
  void give_rank(const TrackedProcess& tracked);
  Reading what_to_read(int64_t now);
  bool is_near_limit() const noexcept;
  bool wants_pss(uint64_t sum, bool is_steady, bool has_new_copies);
  bool may_have_huge_pages() const;
  bool has_copied(int64_t now);
  uint64_t beyond_estimate() const noexcept;
  uint64_t unread_copies() const noexcept;
  uint64_t charged_copies(const MemoryCharges& charges) const noexcept;
  void add_copies(WatchSample& sample, const std::optional<MemoryCharges>& of_cage) const;
  bool may_go_on(int64_t cpu_before) const;
  void read_pss_of(TrackedProcess& tracked, Estimate& to);
  void read_exact(int64_t cpu_before);
  void finish_exact();
  void read_kinds(int64_t now, int64_t cpu_before);
  void read_copies(int64_t cpu_before);
  void note_copies(const std::vector<ForkCopies>& copies);
  void record_sample(int64_t now);
  void record_share(TrackedProcess& tracked, WatchSample& sample);
  bool note_peak(const WatchSample& sample);
  void keep(WatchSample sample);
  OwnedMemory divided(TrackedProcess& tracked, uint64_t held_bytes);
  const TrackedProcess* tracked_of(int pid) const;
  std::optional<size_t> index_of(int pid) const;
  const WatchSample::Share* share_in(const WatchSample& sample, int pid) const;
  const WatchSample* last_with(int pid) const;
  const WatchSample::Share* last_share(int pid) const;
  void give_record(TrackedProcess& tracked, double at_s);
  uint64_t rss_sum() const noexcept;
  double seconds(int64_t now) const noexcept;

  Clock& clock_;
  const SamplerOptions options_;
  const int64_t begin_ns_;
  std::vector<WatchedProcess> processes_;
  std::vector<TrackedProcess> tracked_;  // the processes alive at the last sample
  std::vector<TrackedProcess> ended_;    // those that have ended since the sample before
  uint64_t last_pid_ = 0;                // last_pid() when the tree was last walked
  int walks_ = 0;                        // samples since last_pid() has changed

  int64_t then_ns_;  // the time of the last sample
  CpuAllowance allowance_;
  int64_t pause_ns_ = kShortestPauseNs;

  bool is_reading_exact_ = false;        // an exact reading has begun and not ended
  std::vector<int> families_read_;       // by read_copies so far, as read_fork_copies asks for them
  std::vector<ForkCopies> fork_copies_;  // theirs
  Owed owed_ = Owed::nothing;
  uint64_t rss_at_exact_ = 0;        // rss_sum() when Pss was last read
  uint64_t rss_of_small_pages_ = 0;  // rss_sum() when may_have_huge_pages() was last false
  uint64_t rss_before_ = 0;          // rss_sum() at the last sample
  int64_t steady_since_ns_;          // rss_sum() has hardly changed since this time
  int64_t faults_at_ns_ = 0;         // when page faults were last read
  uint64_t faults_since_ = 0;        // page faults since Pss was last read
  int64_t exact_at_ns_ = 0;          // when Pss was last read

  uint64_t peak_bytes_ = 0;
  double peak_at_s_ = 0;
  uint64_t unseen_bytes_ = 0;       // by VmHWM, memory that came and went since the last sample
  uint64_t peak_rss_bytes_ = 0;     // the highest VmHWM of any process so far
  uint64_t peak_at_most_ = 0;       // WatchRecord::peak_at_most_bytes
  bool at_most_by_copies_ = false;  // WatchRecord::is_at_most_by_copies
  uint64_t most_copies_ = 0;        // WatchRecord::cow_duplicate_bytes
  std::deque<WatchSample> recent_;  // of the last seconds, the newest at the back
  Timeline timeline_;
  std::optional<ReportedProcesses> reported_;
  uint64_t left_out_ = 0;  // processes without a record
};

}  // namespace modicum
