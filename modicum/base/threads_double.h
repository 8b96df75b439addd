// For tests of what happens when a thread can't be started.
#pragma once

namespace modicum {

// While it lives, this process can start so many more threads; std::thread throws for the next one.
// One at a time, and not under a sanitizer (kIsSanitized), which has a pthread_create of its own.
class ThreadLimit {
 public:
  explicit ThreadLimit(int more);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace modicum
