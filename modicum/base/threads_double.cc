#include "modicum/base/threads_double.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <climits>

namespace modicum {
namespace {
std::atomic<int> threads_left = INT_MAX;
}  // namespace

ThreadLimit::ThreadLimit(int more) { threads_left = more; }
ThreadLimit::~ThreadLimit() { threads_left = INT_MAX; }

}  // namespace modicum

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Replaces libc's function. RLIMIT_NPROC would be simpler, but it does not apply to root.
// Sanitizers replace pthread_create themselves.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  static const auto next =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (modicum::threads_left == INT_MAX) return next(thread, attributes, start, argument);
  if (modicum::threads_left.fetch_sub(1) <= 0) return EAGAIN;
  return next(thread, attributes, start, argument);
}
#endif
