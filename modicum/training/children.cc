#include "modicum/training/children.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "modicum/probe/probe.h"

namespace modicum {
namespace {

[[noreturn]] void idle(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "modicum-child");
  if (getppid() != parent) _exit(0);  // the parent ended before prctl
  while (true) pause();
}

}  // namespace

Children::Children(int count) {
  const pid_t parent = getpid();
  for (int i = 0; i < count; ++i) {
    const pid_t pid = fork();
    if (pid == 0) idle(parent);
    if (pid < 0) fail(Category::no_memory, "a child process could not be started");
    pids_.push_back(pid);
  }
}

Children::~Children() {
  for (const pid_t pid : pids_) kill(pid, SIGKILL);
  for (const pid_t pid : pids_) waitpid(pid, nullptr, 0);
}

uint64_t Children::held_bytes() const {
  uint64_t sum = 0;
  for (const pid_t pid : pids_) sum += read_process_memory(pid).held_bytes();
  return sum;
}

}  // namespace modicum
