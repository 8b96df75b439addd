// Counts what the casts of a load lose. Part of the public header of `stream`.
#pragma once

#include <map>
#include <mutex>

#include "modicum/checkpoint/checkpoint.h"

namespace modicum {

// The losses of targets. Thread-safe; the sums do not depend on the division into calls.
class RangeLosses {
 public:
  void add(uint32_t target, const RangeLoss& loss) {
    const std::lock_guard lock(mutex_);
    of_target_[target].add(loss);
  }
  // Call after the load: by target; targets that have lost nothing are left out.
  const std::map<uint32_t, RangeLoss>& all() const noexcept { return of_target_; }

 private:
  std::mutex mutex_;
  std::map<uint32_t, RangeLoss> of_target_;
};

}  // namespace modicum
