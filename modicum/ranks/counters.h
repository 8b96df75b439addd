// Waiting for counters in shared memory. Internal to `ranks`.
#pragma once

#include <atomic>
#include <cstdint>

#include "modicum/ranks/board.h"

namespace modicum {

// Sleeps while `word` equals `value`, but at most 50 ms, so that the caller can check for failed
// peers. May return early. `word` may be shared between processes.
void wait_on(const std::atomic<uint32_t>& word, uint32_t value) noexcept;
// Wakes all callers of wait_on that sleep on `word`.
void wake_all(const std::atomic<uint32_t>& word) noexcept;

// Waits until is_ready(counter) is true. Sends heartbeats, so that the supervisor sees no stall.
// Throws PEER if a rank fails meanwhile.
template <typename IsReady>
void wait_until(const std::atomic<uint32_t>& counter, Board& board, int rank,
                const IsReady& is_ready) {
  for (uint32_t now = counter.load(std::memory_order_acquire); !is_ready(now);
       now = counter.load(std::memory_order_acquire)) {
    board.check();
    board.beat(rank, 0);
    wait_on(counter, now);
  }
}

}  // namespace modicum
