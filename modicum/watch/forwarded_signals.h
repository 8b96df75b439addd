// Forwards signals to the watched command. Internal to `watch`.
#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include <array>
#include <mutex>
#include <thread>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {

constexpr std::array kForwardedSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// Sends the signals that this process receives to the command, from a thread: the watcher may read
// memory for seconds, and a scheduler waits for the command to end. Signals that a terminal has
// sent (it signals the command too) or a watched process are not sent.
//
// All threads must block kForwardedSignals before construction. One thread calls all functions.
class ForwardedSignals {
 public:
  // `command`: the pid of the command, a child of this process. Throws IO, or NOMEM without a
  // thread.
  explicit ForwardedSignals(int command);
  ~ForwardedSignals();
  ForwardedSignals(const ForwardedSignals&) = delete;
  ForwardedSignals& operator=(const ForwardedSignals&) = delete;

  // The processes that were watched lately, ascending: they may have ended.
  void set_watched(std::vector<int> pids);
  // Calls `wait`, which may wait(2) for the command, while nothing is sent: its pid may be reused
  // at once. If `wait` returns true, the command has ended, and nothing is sent from then on.
  void pause_for(FunctionRef<bool()> wait);

 private:
  void forward() noexcept;
  bool is_of_tree(int sender) const noexcept;
  void send(const signalfd_siginfo& info) noexcept;

  int signals_ = -1;
  int end_ = -1;      // an eventfd: the destructor has begun
  std::mutex mutex_;  // protects the two below
  int command_ = 0;   // 0: it has ended
  std::vector<int> watched_;
  std::thread thread_;
};

}  // namespace modicum
