#include "modicum/base/clock.h"

#include <cerrno>
#include <ctime>

namespace modicum {

int64_t SteadyClock::now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * kNsPerSecond + now.tv_nsec;
}

void SteadyClock::sleep_ns(int64_t duration_ns) {
  timespec left{duration_ns / kNsPerSecond, duration_ns % kNsPerSecond};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

}  // namespace modicum
