// Samples of a whole run in bounded memory. Internal to `watch`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "modicum/watch/record.h"

namespace modicum {

// Keeps one sample per bucket of time, the one in which the tree held most, so that the peak
// survives. When there are too many, buckets become twice as wide:
//
//   held     1 | 3 2 | 5 | 4          buckets of 20 ms
//   held     1 | 3   | 5              the same run in buckets of 40 ms, had they been too many
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
