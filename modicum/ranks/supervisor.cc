#include "modicum/ranks/supervisor.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "modicum/io/io.h"

namespace modicum {
namespace {

constexpr int64_t kPollNs = 5 * kNsPerMs;
constexpr int64_t kTickNs = 100 * kNsPerMs;
constexpr int64_t kGraceNs = 1 * kNsPerSecond;  // for ranks to stop by themselves
constexpr int64_t kReapNs = 2 * kNsPerSecond;   // for the kernel to take a killed rank apart

std::atomic<int> asked_to_stop{0};  // the signal; a handler can reach nothing else
extern "C" void on_stop_signal(int signal) { asked_to_stop.store(signal); }

// SIGINT and SIGTERM set a flag while this lives.
class StopSignals {
 public:
  StopSignals() {
    asked_to_stop.store(0);
    struct sigaction action {};
    action.sa_handler = on_stop_signal;
    sigaction(SIGINT, &action, &before_int_);
    sigaction(SIGTERM, &action, &before_term_);
  }
  ~StopSignals() {
    sigaction(SIGINT, &before_int_, nullptr);
    sigaction(SIGTERM, &before_term_, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

// In the child: never returns, and never runs what the parent set up to run at its exit.
[[noreturn]] void be_rank(SharedBoard& board, int rank, pid_t parent,
                          const std::function<void(int rank)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(exit_code(Category::peer));
  prctl(PR_SET_NAME, fmt::format("modicum-rank-{}", rank).c_str());
  // A terminal's Ctrl-C reaches the whole group; the launcher decides what becomes of it. And where
  // memory runs out, it is a rank that should go, so that somebody is left to say why.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_DFL);
  write_kernel_text("/proc/self/oom_score_adj", "500");
  int code = 0;
  try {
    body(rank);
    board.set_done(rank);
  } catch (const Error& error) {
    board.report(record_of(error, rank));
    code = exit_code(error.category());
  } catch (const std::bad_alloc&) {
    board.report(record_of(Error(Category::no_memory, "out of memory"), rank));
    code = exit_code(Category::no_memory);
  } catch (const std::exception& error) {
    board.report(record_of(Error(Category::internal, error.what()), rank));
    code = exit_code(Category::internal);
  } catch (...) {  // must not get past here: the parent's stack is behind
    board.report(record_of(Error(Category::internal, "an exception of no known type"), rank));
    code = exit_code(Category::internal);
  }
  _exit(code);
}

class Supervisor {
 public:
  Supervisor(SharedBoard& board, Clock& clock, const SuperviseOptions& options)
      : board_(board), clock_(clock), options_(options) {}
  ~Supervisor() { end_all(); }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  void start(const std::function<void(int rank)>& body) {
    const pid_t parent = getpid();
    children_.reserve(static_cast<size_t>(board_.ranks()));
    for (int rank = 0; rank < board_.ranks(); ++rank) {
      const pid_t pid = fork();
      if (pid == 0) be_rank(board_, rank, parent, body);
      if (pid < 0) {
        fail(Category::no_memory, "a rank process could not be started", {.rank = rank});
      }
      children_.push_back({pid});
      board_.beat(rank, 0);
    }
  }

  void watch() {
    int64_t next_tick = clock_.now_ns();
    while (alive() > 0) {
      for (int rank = 0; rank < board_.ranks(); ++rank) look_at(rank);
      heed_stop_signal();
      if (board_.failure() || blamed_) break;
      if (const int64_t now = clock_.now_ns(); now >= next_tick) {
        options_.tick();
        next_tick = now + kTickNs;
      }
      if (alive() > 0) clock_.sleep_ns(kPollNs);
    }
    end_all();
    if (const auto failure = board_.failure()) throw error_of(*failure);
    if (blamed_) throw *blamed_;
  }

 private:
  struct Child {
    pid_t pid = 0;
    bool gone = false;
    int64_t stopped_at_ns = -1;   // of a stop that lasts
    std::string size_in_silence;  // /proc/PID/statm when it was last silent for the limit
  };

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
    if (changed == child.pid) {
      if (WIFSTOPPED(status)) {
        child.stopped_at_ns = now;
      } else if (WIFCONTINUED(status)) {
        child.stopped_at_ns = -1;
        board_.beat(rank, 0);
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

  // A rank can't beat while the kernel commits its memory; it is then its size that moves.
  void judge_silence(int rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    std::string size = read_kernel_text(fmt::format("/proc/{}/statm", child.pid)).value_or("");
    if (size != child.size_in_silence) {
      child.size_in_silence = std::move(size);
      board_.beat(rank, 0);
      return;
    }
    blame(Category::stall, rank,
          fmt::format("has not moved for {} s", 2 * options_.stall_limit_ns / kNsPerSecond));
  }

  void judge_end(int rank, int status) {
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      if (signal == SIGKILL) {
        if (const std::string how = options_.out_of_memory(); !how.empty()) {
          return blame(Category::no_memory, rank, "was killed for lack of memory: " + how);
        }
      }
      return blame(Category::peer, rank,
                   fmt::format("was killed by signal {} ({})", signal, strsignal(signal)));
    }
    const int code = WEXITSTATUS(status);
    if (code != 0) {  // after its own report, if it made one: the first report wins
      blame(Category::peer, rank, fmt::format("ended with exit code {}", code));
    } else if (!board_.is_done(rank)) {
      blame(Category::peer, rank, "left before it was done");
    }
  }

  void blame(Category category, int rank, const std::string& what) {
    const pid_t pid = children_[static_cast<size_t>(rank)].pid;
    const Error error(category, fmt::format("rank {} (pid {}) {}", rank, pid, what),
                      {.rank = rank, .culprit_rank = rank, .culprit_pid = pid});
    board_.report(record_of(error, rank));
    if (!blamed_) blamed_ = error;
  }

  void heed_stop_signal() {
    const int signal = asked_to_stop.load();
    if (signal == 0) return;
    const Category category = signal == SIGINT ? Category::cancelled : Category::preempted;
    board_.report(record_of(
        Error(category, fmt::format("stopped by {}", signal == SIGINT ? "SIGINT" : "SIGTERM")),
        -1));
  }

  // Ranks see the failure on the board and go; who doesn't is killed; none is waited for without
  // bound, since the kernel may hold one in a system call that never ends.
  void end_all() noexcept {
    const int64_t begin = clock_.now_ns();
    bool killed = false;
    for (const Child& child : children_) {  // a stopped rank can't go by itself
      if (!child.gone && child.stopped_at_ns >= 0) kill(child.pid, SIGKILL);
    }
    while (alive() > 0) {
      const int64_t waited = clock_.now_ns() - begin;
      if (!killed && waited >= kGraceNs) {
        for (const Child& child : children_) {
          if (!child.gone) kill(child.pid, SIGKILL);
        }
        killed = true;
      }
      if (waited >= kGraceNs + kReapNs) return;
      for (Child& child : children_) {
        int status = 0;
        if (!child.gone && waitpid(child.pid, &status, WNOHANG) == child.pid) child.gone = true;
      }
      if (alive() > 0) clock_.sleep_ns(kPollNs);
    }
  }

  SharedBoard& board_;
  Clock& clock_;
  const SuperviseOptions& options_;
  std::vector<Child> children_;
  // The first blame. It counts where the board has nothing: its first reporter may have died in the
  // middle of reporting, after which nobody else can.
  std::optional<Error> blamed_;
};

}  // namespace

void run_ranks(SharedBoard& board, Clock& clock, const std::function<void(int rank)>& body,
               const SuperviseOptions& options) {
  const StopSignals signals;
  Supervisor supervisor(board, clock, options);
  supervisor.start(body);
  supervisor.watch();
}

}  // namespace modicum
