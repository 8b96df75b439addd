// The CPU time that sampling may use. Internal to `watch`.
#pragma once

#include <algorithm>

#include "modicum/base/base.h"

namespace modicum {

// A token bucket: it gains `duty` of the time that passes, up to kMaxNs, and each sample takes its
// cost, after which it may be below 0. It begins above 0, so that a short command is measured
// exactly, too.
class CpuAllowance {
 public:
  static constexpr double kFirstNs = 100 * kNsPerMs;
  static constexpr double kMaxNs = 500 * kNsPerMs;

  explicit CpuAllowance(double duty) noexcept : duty_(duty) {}

  void refill(int64_t elapsed_ns) noexcept {
    left_ns_ = std::min(kMaxNs, left_ns_ + duty_ * static_cast<double>(elapsed_ns));
  }
  void spend(int64_t cost_ns) noexcept { left_ns_ -= static_cast<double>(cost_ns); }
  // Whether `rest_ns` are left after a reading that costs `cost_ns`. Below 0 `rest_ns` is a debt.
  bool leaves(double rest_ns, double cost_ns = 0) const noexcept {
    return left_ns_ - cost_ns >= rest_ns;
  }
  double debt_ns() const noexcept { return std::max(0.0, -left_ns_); }

 private:
  const double duty_;
  double left_ns_ = kFirstNs;
};

}  // namespace modicum
