// Every test forks, so this program must stay single-threaded.
#include "modicum/ranks/supervisor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "modicum/io/temp_dir_double.h"

namespace modicum {
namespace {

using Body = std::function<void(SharedBoard& board, int rank)>;

// Memory shared by the test and the ranks of a run.
struct SharedState {
  std::atomic<pid_t> pid[4];
  std::atomic<int> ran;
  std::atomic<int> decisions;
};

class SupervisedRun : public testing::Test {
 protected:
  // Returns the error of a run, or nullopt. Expects that no child process is left.
  std::optional<Error> failure_of(int ranks, const Body& body,
                                  const SuperviseOptions& options = {}) {
    SharedBoard board(ranks, clock_);
    std::optional<Error> failure;
    try {
      run_ranks(
          board, clock_,
          [&](int rank) {
            shared().pid[rank] = getpid();
            ++shared().ran;
            body(board, rank);
          },
          options);
    } catch (const Error& error) {
      failure = error;
    }
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
    EXPECT_EQ(errno, ECHILD);
    return failure;
  }

  // Expects a failure with the category and text of `blame` that names the culprit and its pid.
  struct Blame {
    int culprit = 0;
    Category category = Category::peer;
    std::string text;
  };
  void expect_blame(int ranks, const Blame& blame, const Body& body,
                    const SuperviseOptions& options = {}) {
    const auto failure = failure_of(ranks, body, options);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->category(), blame.category) << failure->what();
    EXPECT_EQ(failure->facts().culprit_rank, blame.culprit) << failure->what();
    EXPECT_EQ(failure->facts().culprit_pid, shared().pid[blame.culprit].load()) << failure->what();
    EXPECT_NE(std::string(failure->what()).find(blame.text), std::string::npos) << failure->what();
  }

  SharedState& shared() { return *reinterpret_cast<SharedState*>(mapping_.bytes().data()); }

  SteadyClock clock_;
  Mapping mapping_ = Mapping::shared(sizeof(SharedState));
};

// Sends heartbeats until another rank has failed, then throws.
[[noreturn]] void live_on(SharedBoard& board, int rank) {
  SteadyClock clock;
  for (;; clock.sleep_ns(kNsPerMs)) {
    board.beat(rank, 0);
    board.check();
  }
}

[[noreturn]] void hang() {
  for (;;) pause();
}

// The state letter of a process in /proc/PID/stat, 'T' if it is stopped.
char state_of(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(stat, line);
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos ? '?' : line.at(name_end + 2);
}

TEST_F(SupervisedRun, ReturnsWhenAllBodiesReturn) {
  for (const int ranks : {1, 2, 4}) {
    shared().ran = 0;
    const auto failure =
        failure_of(ranks, [](SharedBoard& board, int rank) { board.barrier(rank); });
    EXPECT_FALSE(failure.has_value());
    EXPECT_EQ(shared().ran, ranks);
  }
}

TEST_F(SupervisedRun, RanksAreNamedProcessesThatPostResults) {
  SharedBoard board(3, clock_);
  run_ranks(board, clock_, [&](int rank) {
    std::string name;
    std::getline(std::ifstream("/proc/self/comm"), name);
    if (name != "modicum-rank-" + std::to_string(rank)) fail(Category::internal, name);
    const std::byte result[] = {static_cast<std::byte>(rank + 1)};
    board.post(rank, result);
  });
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(board.posted(rank).size(), 1U);
    EXPECT_EQ(board.posted(rank)[0], static_cast<std::byte>(rank + 1));
    EXPECT_TRUE(board.is_done(rank));
  }
}

TEST_F(SupervisedRun, ARanksErrorIsThrownWithItsRank) {
  const auto failure = failure_of(3, [](SharedBoard& board, int rank) {
    if (rank != 1) live_on(board, rank);
    fail(Category::io, "the disk is gone", {.file = "a.safetensors", .offset = 5});
  });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::io);
  EXPECT_EQ(failure->facts().rank, 1);
  EXPECT_EQ(failure->facts().file, "a.safetensors");
  EXPECT_EQ(failure->facts().offset, 5U);
}

TEST_F(SupervisedRun, OtherExceptionsGetACategory) {
  const auto category_of = [&](const std::function<void()>& thrower) {
    const auto failure = failure_of(2, [&](SharedBoard& board, int rank) {
      if (rank == 0) live_on(board, rank);
      thrower();
    });
    EXPECT_EQ(failure->facts().rank, 1);
    return failure->category();
  };
  EXPECT_EQ(category_of([] { throw std::bad_alloc(); }), Category::no_memory);
  EXPECT_EQ(category_of([] { throw std::runtime_error("?"); }), Category::internal);
  EXPECT_EQ(category_of([] { throw 5; }), Category::internal);
}

TEST_F(SupervisedRun, AKilledRankIsNamedWithItsPid) {
  expect_blame(3, {2, Category::peer, "killed by signal 9"}, [](SharedBoard& board, int rank) {
    if (rank != 2) live_on(board, rank);
    raise(SIGKILL);
  });
}

TEST_F(SupervisedRun, AnOomKillIsNomem) {
  const SuperviseOptions options{.out_of_memory = [] { return "oom_kill 1 in /a"; }};
  const auto killed_by = [](int signal) {
    return [signal](SharedBoard& board, int rank) {
      if (rank != 1) live_on(board, rank);
      raise(signal);
    };
  };
  expect_blame(2, {1, Category::no_memory, "oom_kill 1 in /a"}, killed_by(SIGKILL), options);
  expect_blame(2, {1, Category::peer, "killed by signal 15"}, killed_by(SIGTERM), options);
}

TEST_F(SupervisedRun, ALongStopIsBlamedOnTheStoppedRank) {
  const int64_t begin = clock_.now_ns();
  expect_blame(2, {0, Category::peer, "is stopped"},
               [](SharedBoard& board, int rank) {
                 if (rank != 0) live_on(board, rank);
                 raise(SIGSTOP);
                 hang();
               },
               {.stop_grace_ns = 100 * kNsPerMs});
  EXPECT_LT(clock_.now_ns() - begin, 4 * kNsPerSecond);
}

// Must fail if `stop_grace_ns` is ignored.
TEST_F(SupervisedRun, AShortStopIsTolerated) {
  const auto failure =
      failure_of(2,
                 [this](SharedBoard& board, int rank) {
                   if (rank == 0) {
                     raise(SIGSTOP);
                   } else {
                     while (shared().pid[0] == 0 || state_of(shared().pid[0]) != 'T') {
                       clock_.sleep_ns(kNsPerMs);
                       board.beat(rank, 0);
                     }
                     clock_.sleep_ns(100 * kNsPerMs);  // so that the launcher sees the stop
                     kill(shared().pid[0], SIGCONT);
                   }
                   board.barrier(rank);
                 },
                 {.stop_grace_ns = 60 * kNsPerSecond});
  EXPECT_FALSE(failure.has_value()) << failure->what();
}

TEST_F(SupervisedRun, ARankThatExitsEarlyIsNamed) {
  const auto leaves_with = [](int code) {
    return [code](SharedBoard& board, int rank) {
      if (rank != 1) live_on(board, rank);
      _exit(code);
    };
  };
  expect_blame(2, {1, Category::peer, "exited before it was done"}, leaves_with(0));
  expect_blame(2, {1, Category::peer, "ended with exit code 3"}, leaves_with(3));
}

// The kernel discards ended children of a process that ignores SIGCHLD, as it may from its parent.
TEST_F(SupervisedRun, EndsAreSeenWhereSigchldIsIgnored) {
  struct sigaction before {};
  struct sigaction ignored {};
  ignored.sa_handler = SIG_IGN;
  ASSERT_EQ(sigaction(SIGCHLD, &ignored, &before), 0);
  expect_blame(2, {1, Category::peer, "ended with exit code 3"}, [](SharedBoard& board, int rank) {
    if (rank != 1) live_on(board, rank);
    _exit(3);
  });
  EXPECT_FALSE(failure_of(2, [](SharedBoard&, int) {}).has_value());
  struct sigaction after {};
  ASSERT_EQ(sigaction(SIGCHLD, &before, &after), 0);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
}

// The rank claims the board's only failure record and never fills it.
TEST_F(SupervisedRun, ARankThatDiesInsideItsReportIsNamed) {
  void* const nothing = mmap(nullptr, kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(nothing, MAP_FAILED);
  expect_blame(2, {1, Category::peer, "rank 1"}, [&](SharedBoard& board, int rank) {
    if (rank != 1) board.barrier(rank);
    signal(SIGSEGV, SIG_DFL);
    board.report(*static_cast<const ErrorRecord*>(nothing));
  });
  munmap(nothing, kPageBytes);
}

TEST_F(SupervisedRun, ASilentRankHasStalled) {
  expect_blame(2, {1, Category::stall, "made no progress"},
               [](SharedBoard& board, int rank) {
                 if (rank == 0) board.barrier(rank);
                 hang();
               },
               {.stall_limit_ns = 200 * kNsPerMs});
}

// A pread that never returns, as on storage that hangs: the kernel asks a listener, which does not
// answer. Exits with code 3 if the listener can't be installed.
[[noreturn]] void hang_in_pread(const std::string& path, off_t offset) {
  std::array<sock_filter, 4> filter = {{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
                                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 0, 1),
                                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
                                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog program{filter.size(), filter.data()};
  const int file = open(path.c_str(), O_RDONLY);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program) >=
      0) {
    char byte = 0;
    static_cast<void>(!pread(file, &byte, 1, offset));
  }
  _exit(3);
}

TEST_F(SupervisedRun, AStallNamesTheFileAndTheOffset) {
  const TempDir directory;
  const std::string path = directory.path() + "/model-00001.safetensors";
  std::ofstream(path) << "slow";
  const auto failure = failure_of(1, [&](SharedBoard&, int) { hang_in_pread(path, 5'000'000'000); },
                                  {.stall_limit_ns = 200 * kNsPerMs});
  ASSERT_TRUE(failure.has_value());
  ASSERT_EQ(failure->category(), Category::stall) << failure->what();
  EXPECT_EQ(failure->facts().file, "model-00001.safetensors") << failure->what();
  EXPECT_EQ(failure->facts().offset, 5'000'000'000U) << failure->what();
}

// While the kernel commits its memory, a rank sends no heartbeats, but its size changes.
TEST_F(SupervisedRun, ARankWhoseMemoryGrowsHasNotStalled) {
  const auto failure = failure_of(1,
                                  [this](SharedBoard&, int) {
                                    Ledger ledger;
                                    std::vector<Buffer> buffers;
                                    const int64_t until = clock_.now_ns() + 1500 * kNsPerMs;
                                    while (clock_.now_ns() < until) {
                                      buffers.push_back(ledger.charge(Purpose::shards, 64 * kKiB));
                                      clock_.sleep_ns(10 * kNsPerMs);
                                    }
                                  },
                                  {.stall_limit_ns = 400 * kNsPerMs});
  EXPECT_FALSE(failure.has_value()) << failure->what();
}

// The second silence begins after heartbeats, so it must not be compared with the first.
TEST_F(SupervisedRun, TwoSilencesBelowTwiceTheLimitAreNoStall) {
  const auto failure = failure_of(1,
                                  [this](SharedBoard& board, int rank) {
                                    for (int silence = 0; silence < 2; ++silence) {
                                      board.beat(rank, 1);
                                      clock_.sleep_ns(1500 * kNsPerMs);
                                    }
                                  },
                                  {.stall_limit_ns = 1000 * kNsPerMs});
  EXPECT_FALSE(failure.has_value()) << failure->what();
}

TEST_F(SupervisedRun, ARankInABarrierHasNotStalled) {
  const auto failure = failure_of(2,
                                  [this](SharedBoard& board, int rank) {
                                    const int64_t until = clock_.now_ns() + 1200 * kNsPerMs;
                                    while (rank == 1 && clock_.now_ns() < until) {
                                      board.beat(rank, 0);
                                      clock_.sleep_ns(kNsPerMs);
                                    }
                                    board.barrier(rank);
                                  },
                                  {.stall_limit_ns = 500 * kNsPerMs});
  EXPECT_FALSE(failure.has_value()) << failure->what();
}

TEST_F(SupervisedRun, ASignalToTheLauncherEndsTheRun) {
  for (const auto& [signal, category] :
       {std::pair{SIGTERM, Category::preempted}, {SIGINT, Category::cancelled}}) {
    ::signal(signal, SIG_DFL);  // a shell ignores SIGINT for a background process
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    const pid_t launcher = getpid();
    const auto failure = failure_of(2, [=, number = signal](SharedBoard& board, int rank) {
      if (rank == 1) kill(launcher, number);
      live_on(board, rank);
    });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->category(), category) << failure->what();
    struct sigaction after {};
    sigaction(signal, nullptr, &after);
    EXPECT_EQ(after.sa_handler, before.sa_handler) << "the previous handler is restored";
  }
}

TEST_F(SupervisedRun, AnIgnoredSignalStaysIgnored) {
  for (const int signal : {SIGTERM, SIGINT}) {
    ::signal(signal, SIG_IGN);
    const pid_t launcher = getpid();
    const auto failure = failure_of(2, [=](SharedBoard& board, int rank) {
      if (rank == 1) kill(launcher, signal);
      board.barrier(rank);
    });
    EXPECT_EQ(::signal(signal, SIG_DFL), SIG_IGN);
    EXPECT_FALSE(failure.has_value()) << failure->what();
  }
}

// Runs with a grace period; `decisions` counts the launcher's calls of `grace_ns`.
class InGrace : public SupervisedRun {
 protected:
  SuperviseOptions with_grace(int64_t grace_ns) {
    return {.grace_ns = [=, this] {
      ++shared().decisions;
      return grace_ns;
    }};
  }
  void wait_for_decision() {
    while (shared().decisions == 0) clock_.sleep_ns(kNsPerMs);
  }
};

TEST_F(InGrace, RanksFinishAfterSigterm) {
  const pid_t launcher = getpid();
  const auto failure = failure_of(
      2,
      [&](SharedBoard& board, int rank) {
        board.barrier(rank);
        if (rank == 1) {  // a scheduler sends the signal to all processes, too
          for (const pid_t pid : {shared().pid[0].load(), shared().pid[1].load(), launcher}) {
            kill(pid, SIGTERM);
          }
        }
        wait_for_decision();
        board.barrier(rank);
      },
      with_grace(3600 * kNsPerSecond));
  EXPECT_FALSE(failure.has_value()) << failure->what();
  EXPECT_EQ(shared().decisions, 1);
}

TEST_F(InGrace, TheEndOfTheGracePeriodEndsTheRun) {
  const pid_t launcher = getpid();
  for (const int64_t grace_ns : {int64_t{0}, 200 * kNsPerMs}) {
    const auto failure = failure_of(
        2,
        [&](SharedBoard& board, int rank) {
          if (rank == 1) kill(launcher, SIGTERM);
          live_on(board, rank);
        },
        with_grace(grace_ns));
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->category(), Category::preempted) << failure->what();
  }
}

TEST_F(InGrace, ALaterSigtermEndsTheRun) {
  const pid_t launcher = getpid();
  const auto failure = failure_of(
      1,
      [&](SharedBoard& board, int rank) {
        for (;; clock_.sleep_ns(100 * kNsPerMs)) {
          kill(launcher, SIGTERM);
          board.beat(rank, 0);
          board.check();
        }
      },
      with_grace(3600 * kNsPerSecond));
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::preempted) << failure->what();
  EXPECT_EQ(shared().decisions, 1);
}

TEST_F(InGrace, SigintEndsTheRun) {
  ::signal(SIGINT, SIG_DFL);  // a shell ignores it for a background process
  const pid_t launcher = getpid();
  const auto failure = failure_of(
      1,
      [&](SharedBoard& board, int rank) {
        kill(launcher, SIGTERM);
        wait_for_decision();
        kill(launcher, SIGINT);
        const int64_t until = clock_.now_ns() + 2 * kNsPerSecond;
        for (; clock_.now_ns() < until; clock_.sleep_ns(kNsPerMs)) board.check();
        board.beat(rank, 0);
      },
      with_grace(3600 * kNsPerSecond));
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::cancelled) << failure->what();
}

TEST_F(SupervisedRun, ARankThatDoesNotExitIsKilled) {
  const int64_t begin = clock_.now_ns();
  const auto failure = failure_of(2, [](SharedBoard&, int rank) {
    if (rank == 0) fail(Category::io, "broken");
    signal(SIGTERM, SIG_IGN);
    hang();
  });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->facts().rank, 0);
  EXPECT_LT(clock_.now_ns() - begin, 4 * kNsPerSecond);
}

TEST_F(SupervisedRun, AnExceptionOfTheTickEndsTheRun) {
  int ticks = 0;
  SharedBoard board(2, clock_);
  const SuperviseOptions options{.tick = [&] {
    if (++ticks == 3) fail(Category::usage, "enough");
  }};
  EXPECT_THROW(run_ranks(
                   board, clock_, [](int) { hang(); }, options),
               Error);
  EXPECT_EQ(ticks, 3);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
}

// The read end reports end of file when the last process that holds the write end has ended.
TEST_F(SupervisedRun, RanksDieWithTheLauncher) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    close(ends[0]);
    SharedBoard board(2, clock_);
    run_ranks(board, clock_, [&](int) {
      const char here = 'r';
      if (write(ends[1], &here, 1) == 1) hang();
    });
    _exit(0);
  }
  close(ends[1]);
  char byte = 0;
  for (int rank = 0; rank < 2; ++rank) ASSERT_EQ(read(ends[0], &byte, 1), 1);
  kill(launcher, SIGKILL);
  EXPECT_EQ(read(ends[0], &byte, 1), 0) << "expected end of file";
  close(ends[0]);
  EXPECT_EQ(waitpid(launcher, nullptr, 0), launcher);
}

}  // namespace
}  // namespace modicum
