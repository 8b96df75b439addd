#include "modicum/ranks/counters.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace modicum {

void wait_on(const std::atomic<uint32_t>& word, uint32_t value) noexcept {
  // Not FUTEX_WAIT_PRIVATE: the word may be in memory of several processes.
  const timespec most{0, 50 * kNsPerMs};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, value, &most, nullptr,
          0);
}

void wake_all(const std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace modicum
