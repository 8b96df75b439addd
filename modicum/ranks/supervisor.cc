#include "modicum/ranks/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/ranks/rank_body.h"
#include "modicum/ranks/stop_signals.h"

namespace modicum {
namespace {

constexpr int64_t kPollNs = 5 * kNsPerMs;
constexpr int64_t kTickNs = 100 * kNsPerMs;
constexpr int64_t kGraceNs = 1 * kNsPerSecond;  // for ranks to see the failure and exit
constexpr int64_t kReapNs = 2 * kNsPerSecond;   // for the kernel to unmap a killed rank's memory
// scancel, systemd and timeout send a signal to the processes of a group one after another. Within
// this time after a rank has died of SIGTERM, the launcher may still receive SIGTERM itself.
constexpr int64_t kSignalSpreadNs = 1 * kNsPerSecond;

bool is_oversubscribed(int ranks) { return ranks > kMaxRanksPerCore * usable_cpus(); }

// Holds ranks back until all have been forked: thousands of running ranks would leave the launcher
// no CPU to fork the others or to handle signals.
class StartGate {
 public:
  StartGate() {
    if (pipe2(ends_, O_CLOEXEC) == 0) return;
    fail(Category::io, fmt::format("a pipe for the rank processes could not be made: {}",
                                   std::generic_category().message(errno)));
  }
  ~StartGate() {
    open();
    close(ends_[0]);
  }
  StartGate(const StartGate&) = delete;
  StartGate& operator=(const StartGate&) = delete;

  void open() noexcept {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }
  // In a rank: waits for end of file, which comes when all processes have closed the write end.
  void pass() noexcept {
    open();
    char nothing = 0;
    while (read(ends_[0], &nothing, 1) < 0 && errno == EINTR) {
    }
    close(ends_[0]);
  }

 private:
  int ends_[2] = {-1, -1};
};

// How a rank process handles SIGTERM.
enum class OnTerm : uint8_t { die, ignore };

// Prepares the child process for the rank's body.
void become_rank(int rank, pid_t parent, bool is_oversubscribed, OnTerm on_term) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // If the parent died before prctl, the kernel sends no SIGKILL. Then the parent has changed.
  if (getppid() != parent) _exit(exit_code(Category::peer));
  prctl(PR_SET_NAME, fmt::format("modicum-rank-{}", rank).c_str());
  // A terminal's Ctrl-C reaches the whole process group; only the launcher handles it.
  signal(SIGINT, SIG_IGN);
  const auto inherited = signal(SIGTERM, SIG_IGN);  // the launcher's handler, unless it is ignored
  if (on_term == OnTerm::die && inherited != SIG_IGN) signal(SIGTERM, SIG_DFL);
  // If memory runs out, the kernel should kill a rank, so that the launcher can report it.
  constexpr int kOomScore = 500;
  const std::string path = "/proc/self/oom_score_adj";
  const std::string score = read_kernel_text(path).value_or("");
  if (std::atoi(score.c_str()) < kOomScore) write_kernel_text(path, std::to_string(kOomScore));
  if (is_oversubscribed) {
    const sched_param lowest{};
    sched_setscheduler(0, SCHED_IDLE, &lowest);
  }
}

class Supervisor {
 public:
  Supervisor(SharedBoard& board, Clock& clock, const SuperviseOptions& options)
      : board_(board), clock_(clock), options_(options) {}
  ~Supervisor() { end_all(kGraceNs); }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Throws CANCELLED or PREEMPTED on a signal, NOMEM if fork fails, IO if pipe2 fails.
  void start(FunctionRef<void(int rank)> body) {
    StartGate gate;
    try {
      fork_all(gate, body);
    } catch (...) {
      end_all(0);  // before ~StartGate opens the gate, so that no body runs
      throw;
    }
  }

  void watch() {
    int64_t next_tick = clock_.now_ns();
    while (alive() > 0 || terminated_) {
      for (int rank = 0; rank < board_.ranks(); ++rank) look_at(rank);
      if (const auto error = stop_.received(); error && !is_in_grace(*error)) {
        board_.report(record_of(*error, std::nullopt));
      }
      if (terminated_ && clock_.now_ns() - terminated_at_ns_ >= kSignalSpreadNs)
        blame(*terminated_);
      if (board_.failure() || blamed_) break;
      if (const int64_t now = clock_.now_ns(); now >= next_tick) {
        options_.tick();
        next_tick = now + kTickNs;
      }
      if (alive() > 0 || terminated_) clock_.sleep_ns(kPollNs);
    }
    end_all(kGraceNs);
    if (const auto failure = board_.failure()) throw error_of(*failure);
    if (blamed_) throw *blamed_;
  }

 private:
  struct Child {
    pid_t pid = 0;
    bool gone = false;
    bool killed = false;
    int64_t stopped_at_ns = -1;   // when the supervisor noticed that it was stopped; -1: running
    std::string size_in_silence;  // text of /proc/PID/statm at the last check; "": none yet
    int64_t checked_at_ns = 0;    // time of the heartbeat that the last check recorded
  };

  void fork_all(StartGate& gate, FunctionRef<void(int rank)> body) {
    const pid_t parent = getpid();
    children_.reserve(static_cast<size_t>(board_.ranks()));
    for (int rank = 0; rank < board_.ranks(); ++rank) {
      stop_.check();
      const pid_t pid = fork();
      if (pid == 0) {
        [&]() noexcept {  // the parent's destructors and exit handlers run in no rank
          become_rank(rank, parent, is_oversubscribed(board_.ranks()),
                      options_.grace_ns ? OnTerm::ignore : OnTerm::die);
          gate.pass();
          _exit(run_rank_body(board_, rank, body));
        }();
      }
      if (pid < 0) {
        fail(Category::no_memory,
             fmt::format("fork failed: {}", std::generic_category().message(errno)),
             {.rank = rank});
      }
      children_.push_back({pid});
    }
    // A rank's silence counts from here: forking thousands of ranks may take long.
    for (int rank = 0; rank < board_.ranks(); ++rank) board_.beat(rank, 0);
  }

  // Whether ranks may go on after `received`, the error of a SIGINT or SIGTERM. The first call
  // after SIGTERM begins the grace period. Later calls check that it has not passed and that no
  // further signal has arrived.
  bool is_in_grace(const Error& received) {
    if (!options_.grace_ns || received.category() != Category::preempted) return false;
    const int64_t now = clock_.now_ns();
    if (!grace_) grace_ = Grace{.begin_ns = now, .ns = options_.grace_ns()};
    const int64_t passed_ns = now - grace_->begin_ns;
    // SIGTERMs of the first second repeat the first one and do not end the grace period.
    if (passed_ns < kSignalSpreadNs) grace_->signals = stop_.count();
    return passed_ns < grace_->ns && stop_.count() == grace_->signals;
  }

  int alive() const {
    return static_cast<int>(std::count_if(children_.begin(), children_.end(),
                                          [](const Child& child) { return !child.gone; }));
  }

  void look_at(int rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    if (child.gone) return;
    int status = 0;
    const pid_t changed = waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED);
    const int64_t now = clock_.now_ns();
    if (changed < 0 && errno == ECHILD) {  // another wait of this process took it
      child.gone = true;
      if (!board_.is_done(rank)) blame(Category::peer, rank, "ended");
      return;
    }
    if (changed == child.pid) {
      if (WIFSTOPPED(status)) {
        child.stopped_at_ns = now;
      } else if (WIFCONTINUED(status)) {
        child.stopped_at_ns = -1;
        board_.beat(rank, 0);  // the time while it was stopped does not count as silence
      } else {
        child.gone = true;
        judge_end(rank, status);
        return;
      }
    }
    if (child.stopped_at_ns >= 0 && now - child.stopped_at_ns >= options_.stop_grace_ns) {
      blame(Category::peer, rank, "is stopped");
    } else if (child.stopped_at_ns < 0 && !board_.is_waiting(rank) && !board_.is_done(rank) &&
               now - board_.last_beat_ns(rank) >= options_.stall_limit_ns) {
      judge_silence(rank);
    }
  }

  // A rank sends no heartbeats while the kernel commits its memory, but its size then changes. So a
  // changed size counts as a heartbeat; so does the first check of a silence, which has no earlier
  // size to compare with.
  void judge_silence(int rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    std::string size = read_kernel_text(fmt::format("/proc/{}/statm", child.pid)).value_or("");
    const bool is_first = board_.last_beat_ns(rank) != child.checked_at_ns;
    if (is_first || size != child.size_in_silence) {
      child.size_in_silence = std::move(size);
      board_.beat(rank, 0);
      child.checked_at_ns = board_.last_beat_ns(rank);
      return;
    }
    Error stalled = blame_for(
        Category::stall, rank,
        fmt::format("made no progress for {} s", 2 * options_.stall_limit_ns / kNsPerSecond));
    if (const auto call = blocked_call(child.pid)) {
      Facts facts = stalled.facts();
      facts.file = call->file;
      facts.offset = call->offset;
      stalled = Error(stalled.category(), stalled.what_happened(), std::move(facts));
    }
    blame(stalled);
  }

  void judge_end(int rank, int status) {
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      if (signal == SIGKILL) {
        if (const std::string reason = options_.out_of_memory(); !reason.empty()) {
          return blame(Category::no_memory, rank, "was killed for lack of memory: " + reason);
        }
      }
      const Error error =
          blame_for(Category::peer, rank,
                    fmt::format("was killed by signal {} ({})", signal, strsignal(signal)));
      if (signal != SIGTERM) return blame(error);
      if (!terminated_) {
        terminated_ = error;
        terminated_at_ns_ = clock_.now_ns();
      }
      return;
    }
    const int code = WEXITSTATUS(status);
    if (code != 0) {  // if the rank has reported an error, run_ranks throws that one instead
      blame(Category::peer, rank, fmt::format("ended with exit code {}", code));
    } else if (!board_.is_done(rank)) {
      blame(Category::peer, rank, "exited before it was done");
    }
  }

  Error blame_for(Category category, int rank, const std::string& what) const {
    const pid_t pid = children_[static_cast<size_t>(rank)].pid;
    return Error(category, fmt::format("rank {} (pid {}) {}", rank, pid, what),
                 {.rank = rank, .culprit_rank = rank, .culprit_pid = pid});
  }

  void blame(const Error& error) {
    board_.report(record_of(error, std::nullopt));
    if (!blamed_) blamed_ = error;
  }
  void blame(Category category, int rank, const std::string& what) {
    blame(blame_for(category, rank, what));
  }

  // Ranks that see a failure on the board exit. Those still alive after `grace_ns` are killed. The
  // wait for their end is bounded: the kernel may hold one in an uninterruptible system call.
  void end_all(int64_t grace_ns) noexcept {
    if (std::exchange(has_ended_, true)) return;
    // When oversubscribed, not all ranks would get CPU time to exit within the grace period.
    if (is_oversubscribed(board_.ranks())) grace_ns = 0;
    const int64_t begin = clock_.now_ns();
    while (alive() > 0) {
      const int64_t waited = clock_.now_ns() - begin;
      if (waited >= grace_ns + kReapNs) return;
      for (Child& child : children_) {
        if (child.gone) continue;
        // A stopped rank cannot exit by itself.
        const bool must_kill = waited >= grace_ns || child.stopped_at_ns >= 0;
        if (must_kill && !std::exchange(child.killed, true)) kill(child.pid, SIGKILL);
        child.gone = waitpid(child.pid, nullptr, WNOHANG) != 0;  // ECHILD: another wait took it
      }
      if (alive() > 0) clock_.sleep_ns(kPollNs);
    }
  }

  SharedBoard& board_;
  Clock& clock_;
  const SuperviseOptions& options_;
  const StopSignals stop_;
  const ChildSignal child_signal_;
  std::vector<Child> children_;
  // The grace period, which begins when the first SIGTERM is noticed.
  struct Grace {
    int64_t begin_ns = 0, ns = 0;
    int signals = 0;  // SIGINTs and SIGTERMs received up to the end of its first second
  };
  std::optional<Grace> grace_;  // nullopt: no SIGTERM yet, or no options_.grace_ns
  bool has_ended_ = false;      // end_all has been called
  // The error of the first rank that died of SIGTERM, and when the supervisor noticed it. It is
  // thrown after kSignalSpreadNs, unless this process receives SIGTERM or SIGINT before then.
  std::optional<Error> terminated_;
  int64_t terminated_at_ns_ = 0;
  // The first failure that the supervisor found. It is thrown if the board has none: a rank that
  // dies inside `report` has claimed the board's only record without filling it.
  std::optional<Error> blamed_;
};

}  // namespace

void run_ranks(SharedBoard& board, Clock& clock, FunctionRef<void(int rank)> body,
               const SuperviseOptions& options) {
  Supervisor supervisor(board, clock, options);
  supervisor.start(body);
  supervisor.watch();
}

}  // namespace modicum
