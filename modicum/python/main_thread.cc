// Pauses of the main thread between two of its bytecodes, where no call of torch is in flight.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

using Clock = std::chrono::system_clock;  // of pthread_cond_timedwait, which every glibc has

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

// Both threads wait without the GIL, and take no GIL while they have the mutex.
struct Pause {
  explicit Pause(double seconds) : most_s(seconds) {}
  const double most_s;
  const pid_t pid = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  bool is_wanted = false, is_queued = false, has_begun = false;
};
using SharedPause = std::shared_ptr<Pause>;

// A pending call of the interpreter, on the main thread. Signal handlers of Python run after it.
int pause_here(void* argument) {
  const std::unique_ptr<SharedPause> pause(static_cast<SharedPause*>(argument));
  Pause& shared = **pause;
  if (getpid() != shared.pid) return 0;  // a fork inherits the queue, and a mutex of any state
  const nb::gil_scoped_release released;
  std::unique_lock lock(shared.mutex);
  shared.is_queued = false;
  shared.has_begun = true;
  shared.changed.notify_all();
  shared.changed.wait_until(lock, after(shared.most_s), [&] { return !shared.is_wanted; });
  shared.is_wanted = false;
  shared.has_begun = false;
  return 0;
}

class MainThreadPause {
 public:
  explicit MainThreadPause(double most_s) : pause_(std::make_shared<Pause>(most_s)) {}

  bool begin(double timeout_s) {
    const nb::gil_scoped_release released;
    std::unique_lock lock(pause_->mutex);
    pause_->is_wanted = true;
    if (!pause_->is_queued && !pause_->has_begun) {
      auto argument = std::make_unique<SharedPause>(pause_);
      pause_->is_queued = Py_AddPendingCall(pause_here, argument.get()) == 0;
      if (pause_->is_queued) static_cast<void>(argument.release());  // pause_here owns it
    }
    if (pause_->is_queued || pause_->has_begun)
      pause_->changed.wait_until(lock, after(timeout_s), [&] { return pause_->has_begun; });
    pause_->is_wanted = pause_->has_begun;
    return pause_->has_begun;
  }

  void end() {
    const nb::gil_scoped_release released;
    const std::unique_lock lock(pause_->mutex);
    pause_->is_wanted = false;
    pause_->changed.notify_all();
  }

 private:
  const SharedPause pause_;
};

}  // namespace

void define_main_thread(nb::module_& module) {
  nb::class_<MainThreadPause>(
      module, "MainThreadPause",
      "Pauses the main thread between two of its bytecodes, for another thread that reads what a "
      "backward replaces without the GIL. Signal handlers run after the pause.")
      .def(nb::init<double>(), "most_s"_a,
           "`most_s`: the longest pause, should the other thread wait for a lock of the main "
           "thread.")
      .def("begin", &MainThreadPause::begin, "timeout_s"_a,
           "Waits until the main thread is paused; False if it is not within `timeout_s`, as while "
           "it is in a call of C, or if the interpreter's queue of calls is full.")
      .def("end", &MainThreadPause::end, "Lets the main thread go on.");
}

}  // namespace modicum::python
