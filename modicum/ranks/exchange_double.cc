#include "modicum/ranks/exchange_double.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace modicum {

template <typename Ready>
void ThreadHub::wait(std::unique_lock<std::mutex>& lock, Board& board, Ready ready) {
  while (!ready()) {
    lock.unlock();
    board.check();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
}

std::vector<ThreadHub::Call> ThreadHub::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

Charge ThreadExchange::commit(Ledger& ledger) {
  return ledger.adopt(Purpose::staging, hub_.part_bytes_);
}

void ThreadExchange::broadcast(int root, std::span<std::byte> bytes, Part /*wanted*/) {
  std::unique_lock lock(hub_.mutex_);
  hub_.calls_.push_back({rank_, root, bytes.size()});
  ++turn_;
  if (rank_ == root) {
    hub_.wait(lock, board_, [this] { return hub_.to_take_ == 0; });
    hub_.sent_bytes_.assign(bytes.begin(), bytes.end());
    hub_.to_take_ = hub_.ranks_ - 1;
    hub_.sent_ = turn_;
    // If a later broadcast has begun, all ranks have copied this one.
    hub_.wait(lock, board_, [this] { return hub_.to_take_ == 0 || hub_.sent_ > turn_; });
    return;
  }
  hub_.wait(lock, board_, [this] { return hub_.sent_ >= turn_; });
  MODICUM_ASSERT(hub_.sent_bytes_.size() == bytes.size());
  if (!bytes.empty()) std::memcpy(bytes.data(), hub_.sent_bytes_.data(), bytes.size());
  --hub_.to_take_;
}

}  // namespace modicum
