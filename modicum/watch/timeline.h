// The samples of a run, thinned to bounded memory. Internal to `watch`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "modicum/watch/record.h"

namespace modicum {

// Keeps one sample per bucket of time: the one in which the tree held most, so the peak is never
// lost. When there are too many samples, buckets become twice as wide:
//
//   added     1 | 3 2 | 5 | 4
//   kept      1 | 3   | 5 | 4          buckets of 20 ms
//   kept        3     |   5            buckets of 40 ms
class Timeline {
 public:
  static constexpr size_t kMostSamples = 600;

  void add(const WatchSample& sample);
  std::vector<WatchSample>& samples() noexcept { return samples_; }

 private:
  int64_t bucket_of(const WatchSample& sample) const noexcept;
  void put(WatchSample sample);

  double width_s_ = 0.02;
  std::vector<WatchSample> samples_;
};

}  // namespace modicum
