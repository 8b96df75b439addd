#include "modicum/watch/forwarded_signals.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "modicum/probe/probe.h"

namespace modicum {

ForwardedSignals::ForwardedSignals(int command) : command_(command) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kForwardedSignals) sigaddset(&set, signal);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  end_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::error_code error(errno, std::generic_category());
  bool has_thread = false;
  try {
    if (signals_ >= 0 && end_ >= 0) {
      thread_ = std::thread([this] { forward(); });
      has_thread = true;
    }
  } catch (const std::system_error& no_thread) {
    error = no_thread.code();
  }
  if (has_thread) return;
  const bool has_files = signals_ >= 0 && end_ >= 0;
  close(signals_);
  close(end_);
  fail(has_files ? Category::no_memory : Category::io,
       "cannot forward signals to the command: " + error.message());
}

ForwardedSignals::~ForwardedSignals() {
  eventfd_write(end_, 1);
  thread_.join();
  close(signals_);
  close(end_);
}

void ForwardedSignals::set_watched(std::vector<int> pids) {
  const std::lock_guard lock(mutex_);
  watched_ = std::move(pids);
}

void ForwardedSignals::pause_for(FunctionRef<bool()> wait) {
  const std::lock_guard lock(mutex_);
  if (wait()) command_ = 0;
}

void ForwardedSignals::forward() noexcept {
  std::array<pollfd, 2> waited = {{{signals_, POLLIN, 0}, {end_, POLLIN, 0}}};
  while (true) {
    if (poll(waited.data(), waited.size(), -1) < 0 && errno != EINTR) return;
    if (waited[1].revents != 0) return;
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof info) == sizeof info) send(info);
  }
}

// The sender may have begun after the last sample, or ended.
bool ForwardedSignals::is_of_tree(int sender) const noexcept {
  if (std::binary_search(watched_.begin(), watched_.end(), sender)) return true;
  try {
    return is_descendant(sender, getpid());
  } catch (const std::exception&) {  // no memory
    return false;
  }
}

void ForwardedSignals::send(const signalfd_siginfo& info) noexcept {
  const std::lock_guard lock(mutex_);
  if (command_ == 0 || info.ssi_code == SI_KERNEL) return;
  if (is_of_tree(static_cast<int>(info.ssi_pid))) return;
  kill(command_, static_cast<int>(info.ssi_signo));
}

}  // namespace modicum
