#include "modicum/ranks/counters.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace modicum {

void wait_on(const std::atomic<uint32_t>& word, uint32_t value) noexcept {
  // Not FUTEX_WAIT_PRIVATE: the word may be in memory shared between processes.
  const timespec timeout{0, 50 * kNsPerMs};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, value, &timeout, nullptr,
          0);
}

void wake_all(const std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace modicum
