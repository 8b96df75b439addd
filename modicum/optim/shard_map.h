// Where the elements of a rank's shards lie: between local and global indices, and in the planes.
// Internal to `optim`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "modicum/optim/shards.h"

namespace modicum {

// Neighbouring elements both in local and in global order.
struct Stretch {
  int64_t at = 0;     // local
  int64_t first = 0;  // global
  int64_t n = 0;
  int64_t scale = 0;  // index of its first block among the shard's
};

// One shard: its runs, its blocks of scales and its buckets.
class ShardIndex {
 public:
  explicit ShardIndex(const ShardSpec& spec);  // MISMATCH where runs overlap

  int64_t numel() const noexcept { return numel_; }
  int64_t scales() const noexcept { return scales_; }
  int64_t buckets() const noexcept { return buckets_; }
  int64_t bucket_of(int64_t first) const noexcept {
    return first / kBucketElements - first_bucket_;
  }
  // Local elements [begin, end) of a bucket.
  int64_t bucket_begin(int64_t bucket) const noexcept {
    return before((first_bucket_ + bucket) * kBucketElements);
  }
  // The end of the bucket in which local element `at` lies.
  int64_t bucket_end_around(int64_t at) const noexcept;
  // Whether no block of scales reaches over local index `at`.
  bool is_block_edge(int64_t at) const noexcept;

  // The stretches of local elements [begin, end), cut where buckets end.
  template <typename Fn>
  void for_each_stretch(int64_t begin, int64_t end, const Fn& fn) const {
    if (begin >= end) return;
    for (auto run = run_around(begin); begin < end; ++run) {
      const int64_t run_end = std::min(end, run->at + run->n);
      while (begin < run_end) {
        const int64_t first = run->first + (begin - run->at);
        const int64_t to_edge = kBucketElements - first % kBucketElements;
        const int64_t n = std::min(to_edge, run_end - begin);
        fn(Stretch{begin, first, n, run->scale + first / kScaleBlock - run->first / kScaleBlock});
        begin += n;
      }
    }
  }

 private:
  using Runs = std::vector<Stretch>;
  Runs::const_iterator run_around(int64_t at) const noexcept;
  int64_t before(int64_t first) const noexcept;  // local elements before this global index

  Runs runs_;
  int64_t numel_ = 0;
  int64_t scales_ = 0;
  int64_t first_bucket_ = 0;
  int64_t buckets_ = 0;
};

// A bucket's norm, in the making.
struct Bucket {
  int64_t left = 0;  // elements that have yet to arrive, each as often as it is expected
  GradNorm norm;
};

// Bytes of a shard's part of a plane, each a whole number of cache lines: codes, and their scales.
struct PlaneBytes {
  static constexpr uint64_t kAlignment = 64;
  uint64_t codes = 0;
  uint64_t scales = 0;
};
PlaneBytes plane_bytes(const StateFormatRow& row, Plane plane, const ShardIndex& shard);
// Bytes of a plane's arena before its first shard, where it has any. Arenas are aligned to huge
// pages: with the same lower address bits in all planes, an element's places push each other out of
// the cache's ways, and a step takes half as long again.
constexpr uint64_t bytes_before(Plane plane) noexcept { return static_cast<uint64_t>(plane) * 640; }

// All shards, and the arenas that hold them: plane by plane the shards' codes one after another,
// then their scales; behind the gradients the buckets.
class ShardMap {
 public:
  explicit ShardMap(const AdamWSpec& spec);

  struct Place {
    std::optional<uint64_t> codes;  // bytes into the arena; nothing: not there, or the caller's
    uint64_t scales = 0;
  };
  const ShardIndex& index(size_t shard) const { return shards_[shard]; }
  const Place& place(size_t shard, Plane plane) const {
    return places_[shard][static_cast<size_t>(plane)];
  }
  size_t shards() const noexcept { return shards_.size(); }
  uint64_t arena_bytes(Plane plane) const { return arena_bytes_[static_cast<size_t>(plane)]; }
  uint64_t buckets_at() const noexcept { return buckets_at_; }  // bytes into the gradients' arena
  uint64_t first_bucket(size_t shard) const { return first_bucket_[shard]; }
  uint64_t buckets() const { return first_bucket_.back(); }

 private:
  void lay_out(const AdamWSpec& spec, Plane plane);

  std::vector<ShardIndex> shards_;
  std::vector<std::array<Place, kPlanes>> places_;
  std::array<uint64_t, kPlanes> arena_bytes_{};
  uint64_t buckets_at_ = 0;
  std::vector<uint64_t> first_bucket_;  // one per shard, and the end
};

// Which thread steps which elements. Each gets as many, up to a bucket: its part of every arena is
// then, but for that, the part whose pages it has committed.
class Partition {
 public:
  Partition(const ShardMap& map, int threads);

  template <typename Fn>
  void for_each_stretch(int thread, const Fn& fn) const {
    const Cut& begin = cuts_[static_cast<size_t>(thread)];
    const Cut& end = cuts_[static_cast<size_t>(thread) + 1];
    for (size_t shard = begin.shard; shard < map_.shards() && shard <= end.shard; ++shard) {
      const ShardIndex& index = map_.index(shard);
      index.for_each_stretch(shard == begin.shard ? begin.at : 0,
                             shard == end.shard ? end.at : index.numel(),
                             [&](const Stretch& stretch) { fn(shard, stretch); });
    }
  }

 private:
  struct Cut {
    size_t shard = 0;
    int64_t at = 0;  // local
  };
  const ShardMap& map_;
  std::vector<Cut> cuts_;  // one more than threads
};

// Of the format's row; nothing where the format has no such plane. (amsgrad's is there for groups
// that ask.)
std::optional<DType> plane_dtype(const StateFormatRow& row, Plane plane) noexcept;
Purpose plane_purpose(Plane plane) noexcept;

// USAGE or UNSUPPORTED, where no step can be made with them.
void check_options(const AdamOptions& options);

}  // namespace modicum
