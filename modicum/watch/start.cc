#include "modicum/watch/start.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <vector>

#include "modicum/watch/reported.h"

namespace modicum {
namespace {

enum class Step : int { enter_group, set_variable, redirect_stdout, exec };

// The message of the forked process if it can't become the command.
struct Failure {
  Step step = Step::enter_group;
  int error = 0;  // errno
};

std::string reason(int error) { return std::generic_category().message(error); }

std::string text_of(const Failure& failure, const Start& start) {
  const std::string why = reason(failure.error);
  switch (failure.step) {
    case Step::enter_group:
      return fmt::format("it cannot enter its memory cgroup: write {}: {}", start.entry, why);
    case Step::set_variable: return fmt::format("setenv {}: {}", kWatchVariable, why);
    case Step::redirect_stdout: return "dup2: " + why;
    case Step::exec: break;
  }
  return why;
}

// Returns only if a step has failed: that step. errno has its error, or is 0 after a short write.
Step exec_command(const Start& start, char* const* words) {
  errno = 0;
  if (!start.entry.empty() && !write_kernel_text(start.entry, "0")) return Step::enter_group;
  if (setenv(kWatchVariable, start.reports.c_str(), 1) != 0) return Step::set_variable;
  if (start.task.is_stdout_for_us && dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    return Step::redirect_stdout;
  }
  execvp(words[0], words);
  return Step::exec;
}

// Runs in the forked process of `parent`: becomes the command. Writes a Failure to `failure_pipe`
// if it can't; a successful exec closes the pipe.
[[noreturn]] void become(const Start& start, pid_t parent, FunctionRef<void()> restore,
                         int failure_pipe) {
  if (start.task.ends_with_us) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // the parent ended before prctl
  }
  std::vector<char*> words;
  for (const std::string& word : start.task.command) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  start.task.restore_signals();
  restore();
  const Step step = exec_command(start, words.data());
  const Failure failure{.step = step, .error = errno == 0 ? EIO : errno};  // 0: a short write
  static_cast<void>(!write(failure_pipe, &failure, sizeof failure));
  _exit(127);
}

}  // namespace

int start_command(const Start& start, FunctionRef<void()> restore) {
  const std::string cannot = fmt::format("cannot start '{}': ", printable(start.task.command[0]));
  int failure_pipe[2];
  if (pipe2(failure_pipe, O_CLOEXEC) != 0) fail(Category::io, cannot + "pipe2: " + reason(errno));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  const int fork_error = errno;
  if (pid == 0) become(start, parent, restore, failure_pipe[1]);
  close(failure_pipe[1]);
  Failure failure;
  ssize_t got = -1;
  while (pid > 0 && (got = read(failure_pipe[0], &failure, sizeof failure)) < 0 && errno == EINTR) {
  }
  close(failure_pipe[0]);
  if (pid < 0) fail(Category::no_memory, cannot + "fork: " + reason(fork_error));
  if (got <= 0) return pid;
  waitpid(pid, nullptr, 0);
  fail(Category::io, cannot + text_of(failure, start));
}

}  // namespace modicum
