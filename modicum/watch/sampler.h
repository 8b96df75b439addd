// Samples a process tree within a share of one core. Internal to `watch`.
//
// A sample reads the status of each process (about 20 us), which counts a shared page in full. The
// exact figures, Pss, cost 10 to 50 ms per GiB, so they are read near new peaks only. In between a
// process is taken to hold what it held at its last reading, plus the private memory that it has
// gained since:
//
//   status      RssAnon 100 --> 160 (a fork: + 160) --> 160, 160 (the parent writes) --> 160, 160
//   estimate            100     160          160                 160
//   Pss                                              80, 80                        160, 160
//
// An estimate is never too high, since RssAnon grows by new pages only. A copy-on-write changes no
// status; it is noticed by the page faults that it costs.
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
#include "modicum/watch/record.h"
#include "modicum/watch/reported.h"
#include "modicum/watch/timeline.h"

namespace modicum {

struct SamplerOptions {
  int root_pid = 0;                  // its descendants are watched, not the process itself
  std::string root;                  // of /proc, for tests
  double duty = 0.005;               // of one core
  std::function<int64_t()> cpu_ns;   // the CPU time of this process so far
  std::optional<MemoryCgroup> cage;  // of the command alone
  uint64_t limit_bytes = 0;          // of the cage; 0: none
  uint64_t forked_rss_bytes = 0;     // of the command before exec, which its ru_maxrss includes
  SelfReports* reports = nullptr;    // of the processes about themselves
  ReportedProcesses::IsSameProgram is_same_program;
};

// One thread.
class TreeSampler {
 public:
  static constexpr int64_t kShortestPauseNs = 20 * kNsPerMs;
  static constexpr int64_t kPauseNearLimitNs = 4 * kNsPerMs;
  static constexpr size_t kMostShares = 64;  // of one sample
  // With a record of their own. Later ones get one if they hold 1/64 of the peak, up to 8 times as
  // many; the others count in the sums only.
  static constexpr size_t kMostProcesses = 512;

  TreeSampler(Clock& clock, SamplerOptions options);

  // Takes one sample.
  void sample();
  // Until the next sample, so that samples stay within half of the duty, or within 2 % while
  // credit is ample, as at the beginning.
  int64_t pause_ns() const noexcept { return pause_ns_; }

  // The processes that were alive at the last sample.
  std::vector<int> alive() const;
  // What a process held at the last sample that saw it with memory, else its VmHWM when it was last
  // seen; 0 if it is unknown.
  uint64_t last_held(int pid) const;
  const WatchedProcess* find(int pid) const;  // the last one of that pid
  // The process that grew most within `within_ns`, and by how much: until the last sample that saw
  // process `pid` with memory, or the last one if none did.
  struct Growth {
    int pid = 0;
    uint64_t bytes = 0;
    double seconds = 0;
    size_t owner = 0;  // of its memory, the one that grew most
  };
  Growth growth(int64_t within_ns, int pid) const;
  // The growth of a process from the last sample that saw it to `held_bytes` now.
  Growth growth_to(int pid, uint64_t held_bytes) const;
  // The phase that a process has reported, as of now or of its end; no name: none.
  WatchedPhase phase_of(int pid);
  const WatchSample& last() const noexcept { return recent_.back(); }

  // A process was waited for: the most that it, or one child of its own, ever held (ru_maxrss).
  void note_end(int pid, uint64_t peak_rss_bytes) noexcept;

  // Moves the results into `record`: processes and peaks.
  void finish(WatchRecord& record);

 private:
  struct Tracked {
    int pid = 0;
    std::optional<size_t> process;  // index in processes_
    ProcessStatus status;
    uint64_t pss_bytes = 0;     // at the last exact reading, less the bytes released since
    uint64_t anon_then = 0;     // RssAnon then
    uint64_t faults = 0;        // when last read
    uint64_t copied_bytes = 0;  // since a fork, when last read
    Division division;
    int rank_reads = 0;

    uint64_t rss_bytes() const noexcept { return status.rss_anon + status.rss_shmem; }
    uint64_t mapped_bytes() const noexcept { return rss_bytes() + status.rss_file; }
    uint64_t held_bytes() const noexcept {
      return pss_bytes + (status.rss_anon - std::min(status.rss_anon, anon_then));
    }
  };

  void discover();
  void add(int pid);
  void read_statuses();
  void take_status(Tracked& one, ProcessStatus status);
  void read_reports(int64_t now);
  void read_rank(Tracked& one);
  void give_rank(const Tracked& one);
  bool wants_exact(int64_t now);
  bool has_copied(int64_t now);
  void read_exact();
  void read_copies();
  void record_sample(int64_t now);
  void record_share(Tracked& one, WatchSample& sample);
  void keep(WatchSample sample);
  const WatchSample::Share* share_in(const WatchSample& sample, int pid) const;
  const WatchSample* last_with(int pid) const;
  const WatchSample::Share* last_share(int pid) const;
  void give_record(Tracked& one, double at_s);
  uint64_t rss_sum() const noexcept;
  double seconds(int64_t now) const noexcept;

  Clock& clock_;
  const SamplerOptions options_;
  const int64_t begin_ns_;
  std::vector<WatchedProcess> processes_;
  std::vector<Tracked> tracked_;  // alive
  uint64_t last_pid_ = 0;
  int walks_ = 0;  // through the tree since it has changed

  int64_t then_ns_;   // of the last sample
  double credit_ns_;  // of CPU time for exact readings
  int64_t pause_ns_ = kShortestPauseNs;

  bool owes_copies_ = false;   // Pss was read, the copies were not
  uint64_t rss_at_exact_ = 0;  // the sum when Pss was last read
  uint64_t rss_before_ = 0;    // at the last sample
  int64_t steady_since_ns_;    // the sum has hardly changed since
  int64_t faults_at_ns_ = 0;   // page faults were last read
  uint64_t faults_since_ = 0;  // since Pss was last read
  bool faults_rose_ = false;   // when last read

  uint64_t peak_bytes_ = 0;
  double peak_at_s_ = 0;
  uint64_t unseen_bytes_ = 0;    // that came and went since the last sample, by VmHWM
  uint64_t peak_rss_bytes_ = 0;  // of any process so far
  uint64_t peak_at_most_ = 0;
  uint64_t most_copies_ = 0;
  std::deque<WatchSample> recent_;
  Timeline timeline_;
  std::optional<ReportedProcesses> reported_;
  uint64_t left_out_ = 0;  // processes without a record
};

}  // namespace modicum
