// Waiting for counters in shared memory. Internal to `ranks`.
#pragma once

#include <atomic>
#include <cstdint>

#include "modicum/ranks/board.h"

namespace modicum {

// Sleeps while `word` is `value`, at most 50 ms, so that the caller can check for failed peers.
void wait_on(const std::atomic<uint32_t>& word, uint32_t value) noexcept;
void wake_all(const std::atomic<uint32_t>& word) noexcept;

// Waits until is_ready(counter). PEER if a rank fails meanwhile. Sends heartbeats, so that the
// supervisor sees no stall.
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
