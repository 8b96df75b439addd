#include "modicum/ranks/stop_signals.h"

#include <fmt/format.h>

#include <atomic>

namespace modicum {
namespace {

// Global, since a signal handler takes no context.
std::atomic<int> received_signal{0};
std::atomic<int> received_count{0};
static_assert(std::atomic<int>::is_always_lock_free);
extern "C" void keep_stop_signal(int signal) {
  received_signal.store(signal);
  received_count.fetch_add(1);
}

}  // namespace

StopSignals::StopSignals() {
  sigaction(SIGINT, nullptr, &before_int_);
  sigaction(SIGTERM, nullptr, &before_term_);
  if (before_int_.sa_handler != keep_stop_signal && before_term_.sa_handler != keep_stop_signal) {
    received_signal.store(0);  // this object is the outermost
    received_count.store(0);
  }
  struct sigaction action {};
  action.sa_handler = keep_stop_signal;
  if (before_int_.sa_handler != SIG_IGN) sigaction(SIGINT, &action, nullptr);
  if (before_term_.sa_handler != SIG_IGN) sigaction(SIGTERM, &action, nullptr);
}

StopSignals::~StopSignals() {
  sigaction(SIGINT, &before_int_, nullptr);
  sigaction(SIGTERM, &before_term_, nullptr);
}

std::optional<Error> StopSignals::received() const {
  const int signal = received_signal.load();
  if (signal == 0) return std::nullopt;
  return stop_error(signal);
}

int StopSignals::count() const noexcept { return received_count.load(); }

void StopSignals::check() const {
  if (const auto error = received()) throw *error;
}

Error stop_error(int signal) {
  const bool is_int = signal == SIGINT;
  return Error(is_int ? Category::cancelled : Category::preempted,
               fmt::format("stopped by {}", is_int ? "SIGINT" : "SIGTERM"));
}

}  // namespace modicum
