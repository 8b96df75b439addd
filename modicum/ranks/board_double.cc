#include "modicum/ranks/board_double.h"

#include <algorithm>

namespace modicum {

ScriptedBoard::ScriptedBoard(int ranks, BoardScript script)
    : script_(script), rounds_(static_cast<size_t>(ranks)), digests_(static_cast<size_t>(ranks)) {}

ErrorRecord ScriptedBoard::scripted() const {
  return record_of(Error(Category::io, "failed as scripted"), script_.culprit_rank);
}

void ScriptedBoard::beat(int rank, uint64_t more_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  beats_.push_back({rank, more_bytes});
  if (static_cast<int64_t>(beats_.size()) == script_.fail_at_beat && !failure_) {
    failure_ = scripted();
    changed_.notify_all();
  }
}

bool ScriptedBoard::report(const ErrorRecord& failure) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = failure;
  changed_.notify_all();
  return true;
}

std::optional<ErrorRecord> ScriptedBoard::failure() const {
  const std::lock_guard lock(mutex_);
  if (++checks_ == script_.fail_at_check && !failure_) failure_ = scripted();
  return failure_;
}

void ScriptedBoard::barrier(int rank) {
  {
    std::unique_lock lock(mutex_);
    const uint32_t round = ++rounds_[static_cast<size_t>(rank)];
    changed_.notify_all();
    changed_.wait(lock, [&] {
      return failure_ || *std::min_element(rounds_.begin(), rounds_.end()) >= round;
    });
    if (!failure_) return;
  }
  check();
}

void ScriptedBoard::agree(int rank, const Digest& digest) {
  {
    const std::lock_guard lock(mutex_);
    digests_[static_cast<size_t>(rank)] = digest;
  }
  barrier(rank);
  const std::lock_guard lock(mutex_);
  for (size_t peer = 1; peer < digests_.size(); ++peer) {
    if (digests_[peer] == digests_[0]) continue;
    fail(Category::conflict, "a rank has other inputs than rank 0",
         {.culprit_rank = static_cast<int>(peer)});
  }
}

int64_t ScriptedBoard::checks() const {
  const std::lock_guard lock(mutex_);
  return checks_;
}

std::vector<ScriptedBoard::Beat> ScriptedBoard::beats() const {
  const std::lock_guard lock(mutex_);
  return beats_;
}

uint64_t ScriptedBoard::bytes_of_rank(int rank) const {
  const std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const Beat& beat : beats_) sum += beat.rank == rank ? beat.more_bytes : 0;
  return sum;
}

}  // namespace modicum
