// Makes pthread_create fail, for tests.
#pragma once

namespace modicum {

// While an instance exists, the next `more` calls of pthread_create succeed, and later ones fail
// with EAGAIN. At most one instance may exist at a time. Has no effect under a sanitizer
// (kIsSanitized).
class ThreadLimit {
 public:
  explicit ThreadLimit(int more);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace modicum
