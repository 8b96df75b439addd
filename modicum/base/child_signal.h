// The disposition of SIGCHLD, which a program inherits from its parent.
#pragma once

#include <signal.h>

namespace modicum {

// While it exists, ended children remain until they are waited for. Without it the kernel discards
// them where SIGCHLD is ignored, as in a shell after `trap "" CHLD`, and a wait finds no status.
// The destructor restores the disposition. Threads: one constructs and destroys.
class ChildSignal {
 public:
  ChildSignal() noexcept {
    sigaction(SIGCHLD, nullptr, &before_);
    is_ignored_ = before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0;
    struct sigaction kept {};
    kept.sa_handler = SIG_DFL;
    if (is_ignored_) sigaction(SIGCHLD, &kept, nullptr);
  }
  ~ChildSignal() { restore(); }
  ChildSignal(const ChildSignal&) = delete;
  ChildSignal& operator=(const ChildSignal&) = delete;

  // Also to be called in a child before it executes another program.
  void restore() const noexcept {
    if (is_ignored_) sigaction(SIGCHLD, &before_, nullptr);
  }

 private:
  struct sigaction before_ {};
  bool is_ignored_ = false;
};

}  // namespace modicum
