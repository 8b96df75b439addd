// SIGTERM in a worker process of a data loader.
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "modicum/python/bindings.h"

namespace modicum::python {
namespace {

// Global, since a signal handler takes no context.
pid_t trainer_pid = 0;
pid_t parent_pid = 0;  // the trainer, or multiprocessing's fork server
struct sigaction earlier_action {};

bool trainer_has_ended() {
  return getppid() != parent_pid || (kill(trainer_pid, 0) != 0 && errno == ESRCH);
}

// Hands a SIGTERM of the trainer, or of anyone once the trainer has ended, to the earlier action.
extern "C" void end_by_trainer(int signal, siginfo_t* info, void* context) {
  const int interrupted_errno = errno;
  const bool is_foreign = info->si_pid != trainer_pid && !trainer_has_ended();
  errno = interrupted_errno;
  if (is_foreign) return;
  if ((earlier_action.sa_flags & SA_SIGINFO) != 0) {
    earlier_action.sa_sigaction(signal, info, context);
  } else if (earlier_action.sa_handler == SIG_DFL) {
    sigaction(signal, &earlier_action, nullptr);
    raise(signal);  // acts when this handler returns
  } else if (earlier_action.sa_handler != SIG_IGN) {
    earlier_action.sa_handler(signal);
  }
}

void heed_sigterm_of(pid_t trainer) {
  trainer_pid = trainer;
  parent_pid = getppid();
  struct sigaction action {};
  action.sa_sigaction = end_by_trainer;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  struct sigaction earlier {};
  sigaction(SIGTERM, &action, &earlier);
  // A second call, in the same process or one forked from it, keeps what the first has noted.
  const bool is_ours =
      (earlier.sa_flags & SA_SIGINFO) != 0 && earlier.sa_sigaction == end_by_trainer;
  if (!is_ours) earlier_action = earlier;
}

}  // namespace

void define_worker_signals(nb::module_& module) {
  module.def("heed_sigterm_of", heed_sigterm_of, "trainer"_a,
             "From now on this process ignores SIGTERM, unless the process `trainer`, which has "
             "started it, sends it or has ended.");
}

}  // namespace modicum::python
