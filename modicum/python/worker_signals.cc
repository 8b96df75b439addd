// SIGTERM in a worker process of a data loader.
#include <signal.h>
#include <unistd.h>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

// Global, since a signal handler takes no context.
pid_t parent_pid = 0;
struct sigaction earlier_action {};

// Hands a SIGTERM of the parent, or of anyone once the parent has ended, to the earlier action.
extern "C" void end_by_parent(int signal, siginfo_t* info, void* context) {
  if (info->si_pid != parent_pid && getppid() == parent_pid) return;
  if ((earlier_action.sa_flags & SA_SIGINFO) != 0) {
    earlier_action.sa_sigaction(signal, info, context);
  } else if (earlier_action.sa_handler == SIG_DFL) {
    sigaction(signal, &earlier_action, nullptr);
    raise(signal);  // acts when this handler returns
  } else if (earlier_action.sa_handler != SIG_IGN) {
    earlier_action.sa_handler(signal);
  }
}

void heed_sigterm_of_parent() {
  parent_pid = getppid();
  struct sigaction action {};
  action.sa_sigaction = end_by_parent;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  struct sigaction earlier {};
  sigaction(SIGTERM, &action, &earlier);
  // A second call, in the same process or one forked from it, keeps what the first has noted.
  const bool is_ours =
      (earlier.sa_flags & SA_SIGINFO) != 0 && earlier.sa_sigaction == end_by_parent;
  if (!is_ours) earlier_action = earlier;
}

}  // namespace

void define_worker_signals(nb::module_& module) {
  module.def("heed_sigterm_of_parent", heed_sigterm_of_parent,
             "From now on this process ignores SIGTERM, unless its parent sends it or has ended.");
}

}  // namespace modicum::python
