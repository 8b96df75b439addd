// The samples of a run, thinned to bounded memory. Internal to `watch`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "modicum/watch/record.h"

namespace modicum {

// Keeps one sample per interval of time: the one in which the process tree held the most memory, so
// the peak is never lost. If there are too many samples, intervals become twice as wide, until at
// most half as many are left:
//
//   added     1 | 3 2 | 5 | 4
//   kept      1 | 3   | 5 | 4          intervals of 20 ms
//   kept        3     |   5            intervals of 40 ms
class Timeline {
 public:
  static constexpr size_t kMaxSamples = 600;

  void add(const WatchSample& sample);
  std::vector<WatchSample>& samples() noexcept { return samples_; }

 private:
  int64_t interval_of(const WatchSample& sample) const noexcept;
  void put(WatchSample sample);

  double width_s_ = 0.02;
  std::vector<WatchSample> samples_;
};

}  // namespace modicum
