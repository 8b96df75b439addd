// Makes pthread_create fail, for tests.
#pragma once

namespace modicum {

// While it exists, this process can start `more` threads; std::thread throws for the next one. One
// instance at a time; not under a sanitizer (kIsSanitized), which replaces pthread_create itself.
class ThreadLimit {
 public:
  explicit ThreadLimit(int more);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace modicum
