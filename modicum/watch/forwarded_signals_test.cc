#include "modicum/watch/forwarded_signals.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>

namespace modicum {
namespace {

// Catches: a signal waits until the watcher has time; a signal of a watched process is sent back; a
// signal is sent to a process that has the pid of the ended command.

// Blocks the signals, as the watcher does.
class Blocked {
 public:
  Blocked() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : kForwardedSignals) sigaddset(&set, signal);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~Blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  sigset_t before_{};
};

// A process that writes a letter for each signal that it gets: T, or U for SIGUSR1.
class Command {
 public:
  Command() {
    if (pipe(fds_) != 0) return;
    pid_ = fork();
    if (pid_ != 0) return;
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : kForwardedSignals) sigaddset(&set, signal);
    for (int signal = 0; sigwait(&set, &signal) == 0;) {
      static_cast<void>(!write(fds_[1], signal == SIGTERM ? "T" : "U", 1));
    }
    _exit(0);
  }
  ~Command() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(fds_[0]);
    close(fds_[1]);
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  int pid() const { return pid_; }
  // The next signal that it gets within `within_ms`; "" if it gets none.
  std::string next(int within_ms) {
    pollfd waited{fds_[0], POLLIN, 0};
    char letter = 0;
    if (poll(&waited, 1, within_ms) != 1 || read(fds_[0], &letter, 1) != 1) return "";
    return {letter};
  }

 private:
  int fds_[2] = {-1, -1};
  pid_t pid_ = 0;
};

// This thread reads nothing: as long as an exact reading takes, a signal must not wait for it.
TEST(ForwardedSignals, ReachTheCommandAtOnce) {
  const Blocked blocked;
  Command command;
  kill(getpid(), SIGUSR1);  // before there is a thread
  const ForwardedSignals forwarded(command.pid());
  EXPECT_EQ(command.next(5000), "U");
  kill(getpid(), SIGTERM);
  EXPECT_EQ(command.next(5000), "T");
  EXPECT_EQ(command.next(20), "") << "once";
}

TEST(ForwardedSignals, OfAWatchedProcessAreNotSentBack) {
  const Blocked blocked;
  Command command;
  ForwardedSignals forwarded(command.pid());
  forwarded.set_watched({1, getpid()});
  kill(getpid(), SIGTERM);
  EXPECT_EQ(command.next(50), "");
  forwarded.set_watched({1});
  int sent[2];
  ASSERT_EQ(pipe(sent), 0);
  const pid_t unknown = fork();  // has begun since the last sample
  if (unknown == 0) {
    kill(getppid(), SIGTERM);
    static_cast<void>(write(sent[1], "s", 1));
    pause();
    _exit(0);
  }
  char byte = 0;
  EXPECT_EQ(read(sent[0], &byte, 1), 1);
  EXPECT_EQ(command.next(50), "");
  close(sent[0]);
  close(sent[1]);
  kill(unknown, SIGKILL);
  waitpid(unknown, nullptr, 0);
  kill(getpid(), SIGUSR1);
  EXPECT_EQ(command.next(5000), "U");
}

TEST(ForwardedSignals, AreNotSentToThePidOfAnEndedCommand) {
  const Blocked blocked;
  Command command;
  ForwardedSignals forwarded(command.pid());
  forwarded.pause_for([&] {
    kill(getpid(), SIGTERM);
    EXPECT_EQ(command.next(50), "") << "it waits";
    return false;
  });
  EXPECT_EQ(command.next(5000), "T");
  forwarded.pause_for([] { return true; });
  kill(getpid(), SIGUSR1);
  EXPECT_EQ(command.next(50), "");
}

}  // namespace
}  // namespace modicum
