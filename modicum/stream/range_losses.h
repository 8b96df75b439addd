// Counts what the casts of a load lose. Part of the public header of `stream`.
#pragma once

#include <mutex>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// The losses of each target. Thread-safe; the sums do not depend on the division into calls.
class RangeLosses {
 public:
  explicit RangeLosses(size_t targets) : of_target_(targets) {}

  void add(uint32_t target, const RangeLoss& loss) {
    const std::lock_guard lock(mutex_);
    of_target_[target].add(loss);
  }
  // Call after the load.
  const RangeLoss& of(uint32_t target) const noexcept { return of_target_[target]; }

 private:
  std::mutex mutex_;
  std::vector<RangeLoss> of_target_;
};

}  // namespace modicum
