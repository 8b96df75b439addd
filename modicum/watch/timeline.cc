#include "modicum/watch/timeline.h"

#include <utility>

namespace modicum {

int64_t Timeline::interval_of(const WatchSample& sample) const noexcept {
  return static_cast<int64_t>(sample.at_s / width_s_);
}

void Timeline::put(WatchSample sample) {
  if (samples_.empty() || interval_of(samples_.back()) != interval_of(sample)) {
    samples_.push_back(std::move(sample));
  } else if (sample.held_bytes > samples_.back().held_bytes) {
    samples_.back() = std::move(sample);
  }
}

void Timeline::add(const WatchSample& sample) {
  put(sample);
  if (samples_.size() <= kMaxSamples) return;
  while (samples_.size() > kMaxSamples / 2) {
    width_s_ *= 2;
    std::vector<WatchSample> finer = std::exchange(samples_, {});
    for (WatchSample& finer_sample : finer) put(std::move(finer_sample));
  }
}

}  // namespace modicum
