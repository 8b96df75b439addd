#include "modicum/optim/shard_map.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace modicum {
namespace {

// Two runs in one bucket, and a run that spans several buckets.
ShardSpec spec_of(int64_t row) {
  return {.fqn = "w",
          .runs = {{100, 600}, {1000, 300}, {kBucketElements - 5, 3 * kBucketElements + 77}},
          .row = row};
}

TEST(ShardIndex, StretchesTileTheShardAndDivideNoBlock) {
  for (const int64_t row : {0, 100, 147, 300, 384, 65613}) {
    const ShardSpec spec = spec_of(row);
    const ShardIndex index(spec);
    const ScaleBlocks blocks(row);
    int64_t at = 0;
    int64_t scales = 0;
    int64_t bucket = -1;
    index.for_each_stretch(0, index.numel(), [&](const Stretch& stretch) {
      ASSERT_EQ(stretch.at, at);
      const bool begins_a_run =
          stretch.first == 100 || stretch.first == 1000 || stretch.first == kBucketElements - 5;
      ASSERT_TRUE(begins_a_run || blocks.begin_of(stretch.first) == stretch.first)
          << "element " << stretch.first << ", rows of " << row;
      ASSERT_EQ(stretch.scale, scales) << "element " << stretch.first << ", rows of " << row;
      const int64_t last = stretch.first + stretch.n - 1;
      ASSERT_EQ(index.bucket_of(stretch.first), index.bucket_of(last));
      ASSERT_GE(index.bucket_of(stretch.first), bucket);
      bucket = index.bucket_of(stretch.first);
      ASSERT_LE(stretch.n, kBucketElements + kScaleBlock);
      ASSERT_EQ(index.bucket_end_around(stretch.at), index.bucket_begin(bucket + 1));
      at += stretch.n;
      scales += blocks.block_of(last) - blocks.block_of(stretch.first) + 1;
    });
    EXPECT_EQ(at, index.numel());
    EXPECT_EQ(scales, index.scales());
    EXPECT_EQ(bucket + 1, index.buckets());
  }
}

// commit_pages divides each arena into T equal parts, and thread k of T commits the k-th part.
TEST(Partition, AThreadStepsTheShareThatItCommitted) {
  constexpr int64_t kRow = 300;
  constexpr int64_t kSizes[] = {kRow * 9000, kRow * 20, kRow * 31000, kRow * 700};
  AdamWSpec spec{.format = StateFormat::int8_moments, .groups = {{}}};
  int64_t total = 0;
  for (const int64_t n : kSizes) {
    const std::string fqn = "w" + std::to_string(total);
    spec.shards.push_back({.fqn = fqn, .runs = {{0, n}}, .row = kRow});
    total += n;
  }
  const ShardMap map(spec);
  for (const int threads : {1, 2, 5}) {
    const Partition partition(map, threads);
    int64_t stepped = 0;
    for (int thread = 0; thread < threads; ++thread) {
      const int64_t begin = total * thread / threads;
      const int64_t end = total * (thread + 1) / threads;
      partition.for_each_stretch(thread, [&](size_t shard, const Stretch& stretch) {
        int64_t at = stretch.at;
        for (size_t before = 0; before < shard; ++before) at += map.index(before).numel();
        stepped += stretch.n;
        ASSERT_GE(at, begin) << "thread " << thread << " of " << threads;
        ASSERT_LE(at + stretch.n, end + kBucketElements + kScaleBlock)
            << "thread " << thread << " of " << threads;
      });
    }
    EXPECT_EQ(stepped, total);
  }
}

}  // namespace
}  // namespace modicum
