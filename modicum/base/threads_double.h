// Makes pthread_create fail, for tests.
#pragma once

namespace modicum {

// While an instance exists, this process can start `more` threads; starting another one fails. One
// instance at a time. Has no effect under a sanitizer (kIsSanitized).
class ThreadLimit {
 public:
  explicit ThreadLimit(int more);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace modicum
