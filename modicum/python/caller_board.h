// The Board of a rank in the caller's process group. Internal to `python`.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "modicum/python/bindings.h"
#include "modicum/ranks/ranks.h"
#include "modicum/report/report.h"

namespace modicum::python {

constexpr auto kSignalPause = std::chrono::milliseconds(50);  // between checks for signals

// Reports failures to the other ranks through `peers`, a Python object. Failures of other ranks
// arrive through `fail_here`. Without `peers` (None) there is one rank.
class CallerBoard final : public Board {
 public:
  explicit CallerBoard(nb::object peers) : peers_(std::move(peers)) {}

  void beat(int, uint64_t more_bytes) noexcept override { progress_ += more_bytes; }
  bool report(const ErrorRecord& failure) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return false;
      failure_ = failure;
    }
    if (!peers_.is_none()) tell(failure);
    return true;
  }
  std::optional<ErrorRecord> failure() const override {
    look_for_signals();
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  void barrier(int) override { call("barrier"); }
  void agree(int, const Digest& digest) override {
    call("agree", fmt::format("{:016x}{:016x}", digest.high, digest.low));
  }

  // Cancels the load or save, because another rank has failed or the caller cancels. `rank`: the
  // culprit, or -1. Any thread may call it.
  void fail_here(const std::string& what, int rank) {
    const std::lock_guard lock(mutex_);
    const auto culprit = rank < 0 ? std::nullopt : std::optional(rank);
    if (!failure_) failure_ = record_of(Error(Category::peer, what), culprit);
  }
  uint64_t progress() const noexcept { return progress_; }
  // Makes the calling thread the one that runs Python's signal handlers. Call it before a load,
  // save, resume or check begins on this thread.
  void set_thread() noexcept { thread_ = std::this_thread::get_id(); }

 private:
  template <typename... Args>
  void call(const char* name, Args&&... args) {
    if (peers_.is_none()) return;
    const nb::gil_scoped_acquire acquired;
    peers_.attr(name)(std::forward<Args>(args)...);
  }
  void tell(const ErrorRecord& failure) noexcept {
    const nb::gil_scoped_acquire acquired;
    try {
      peers_.attr("report")(error_json(error_of(failure)));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("modicum: can't report a failure to the other ranks");
    }
  }
  // Python itself can't raise KeyboardInterrupt while C++ runs. So this runs Python's signal
  // handlers and throws the exception that they raise.
  void look_for_signals() const {
    if (std::this_thread::get_id() != thread_) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ < kSignalPause) return;
    looked_ = now;
    const nb::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() == 0) return;
    const std::lock_guard lock(mutex_);
    failure_ = record_of(Error(Category::cancelled, "interrupted"), std::nullopt);
    throw nb::python_error();
  }

  nb::object peers_;
  std::thread::id thread_;
  mutable std::chrono::steady_clock::time_point looked_;
  std::atomic<uint64_t> progress_{0};
  mutable std::mutex mutex_;
  mutable std::optional<ErrorRecord> failure_;
};

}  // namespace modicum::python
