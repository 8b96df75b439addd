#include "modicum/watch/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "modicum/base/base.h"

namespace modicum {
namespace {

// Catches: the last sample of a bucket is kept instead of the largest; the timeline grows with the
// run.

WatchSample sample(double at_s, uint64_t held_bytes) {
  return {.at_s = at_s, .held_bytes = held_bytes};
}

// The peak is one of a hundred thousand samples.
TEST(Timeline, KeepsThePeakInBoundedMemory) {
  Timeline timeline;
  constexpr int kSamples = 100'000, kPeak = 12'345;
  for (int i = 0; i < kSamples; ++i) {
    timeline.add(sample(0.02 * i, i == kPeak ? kGiB : kMiB + static_cast<uint64_t>(i % 7)));
    ASSERT_LE(timeline.samples().size(), Timeline::kMaxSamples);
  }
  const auto& kept = timeline.samples();
  EXPECT_GT(kept.size(), Timeline::kMaxSamples / 3);
  const auto peak = std::max_element(kept.begin(), kept.end(),
                                     [](auto& a, auto& b) { return a.held_bytes < b.held_bytes; });
  EXPECT_EQ(peak->held_bytes, kGiB);
  EXPECT_DOUBLE_EQ(peak->at_s, 0.02 * kPeak);
  EXPECT_TRUE(
      std::is_sorted(kept.begin(), kept.end(), [](auto& a, auto& b) { return a.at_s < b.at_s; }));
}

TEST(Timeline, TheLargestSampleOfABucketIsKept) {
  Timeline timeline;
  timeline.add(sample(0.001, 5));
  timeline.add(sample(0.005, 9));
  timeline.add(sample(0.010, 7));
  timeline.add(sample(0.030, 1));
  ASSERT_EQ(timeline.samples().size(), 2U);
  EXPECT_EQ(timeline.samples()[0].held_bytes, 9U);
  EXPECT_DOUBLE_EQ(timeline.samples()[0].at_s, 0.005);
}

// Samples are so far apart that doubling the buckets once merges none.
TEST(Timeline, SparseSamplesAreThinnedToo) {
  Timeline timeline;
  for (size_t i = 0; i < 2 * Timeline::kMaxSamples; ++i) {
    timeline.add(sample(3600.0 * static_cast<double>(i), i));
  }
  EXPECT_LE(timeline.samples().size(), Timeline::kMaxSamples);
  EXPECT_EQ(timeline.samples().back().held_bytes, 2 * Timeline::kMaxSamples - 1);
}

}  // namespace
}  // namespace modicum
