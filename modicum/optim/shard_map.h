// The mapping between a shard's local indices, the parameter's global indices, and bytes in the
// arenas (one block of memory per plane of the state). Internal to `optim`. Example, a shard with
// the runs {first 60000, n 8000} and {first 200000, n 500}:
//
//   local     0 ........ 5536 ........ 8000 ..... 8500
//   global    60000 .... 65536 ....... 68000
//                                      200000 ... 200500
//   bucket    0        | 1           | 3                   global / kBucketElements (65536)
//   stretches [0, 5536)  [5536, 8000)  [8000, 8500)        contiguous locally and globally, within
//                                                          one bucket
//
// Blocks of scales and buckets are defined by *global* index: 8-bit codes have the same bits for
// every sharding that divides no block, and a bucket's norm has the same bits for every sharding
// that does not divide the bucket. A bucket ends where a block ends: with rows of 300 (blocks of
// 128, 128 and 44) the first bucket has 65,656 elements, since its last block is [65528, 65656).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "modicum/optim/shards.h"

namespace modicum {

// Elements that are contiguous in both local and global order.
struct Stretch {
  int64_t at = 0;     // local
  int64_t first = 0;  // global
  int64_t n = 0;
  int64_t scale = 0;  // index, within the shard, of its first block's scale
};

// One shard: its runs, its blocks of scales and its buckets.
class ShardIndex {
 public:
  explicit ShardIndex(const ShardSpec& spec);  // MISMATCH unless runs are ascending and not empty

  int64_t numel() const noexcept { return numel_; }
  int64_t scales() const noexcept { return scales_; }
  int64_t buckets() const noexcept { return buckets_; }
  int64_t bucket_of(int64_t first) const noexcept {
    return blocks_.begin_of(first) / kBucketElements - first_bucket_;
  }
  // Local index where a bucket begins; the end of the shard for bucket_begin(buckets()).
  int64_t bucket_begin(int64_t bucket) const noexcept { return before(global_begin(bucket)); }
  // The local end of the bucket that holds local element `at`.
  int64_t bucket_end_around(int64_t at) const noexcept;
  // Whether no two elements around local index `at` share a scale: a block or a run begins there,
  // or the shard ends there.
  bool is_block_edge(int64_t at) const noexcept;

  // Visits the stretches of local elements [begin, end), split at the ends of buckets.
  template <typename Fn>
  void for_each_stretch(int64_t begin, int64_t end, const Fn& fn) const {
    if (begin >= end) return;
    for (auto run = run_around(begin); begin < end; ++run) {
      const int64_t run_end = std::min(end, run->at + run->n);
      while (begin < run_end) {
        const int64_t first = run->first + (begin - run->at);
        const int64_t to_edge = global_begin(bucket_of(first) + 1) - first;
        const int64_t n = std::min(to_edge, run_end - begin);
        const int64_t blocks_before = blocks_.block_of(first) - blocks_.block_of(run->first);
        fn(Stretch{begin, first, n, run->scale + blocks_before});
        begin += n;
      }
    }
  }

 private:
  using Runs = std::vector<Stretch>;
  int64_t global_begin(int64_t bucket) const noexcept {
    return blocks_.edge_after((first_bucket_ + bucket) * kBucketElements);
  }
  Runs::const_iterator run_around(int64_t at) const noexcept;
  int64_t before(int64_t first) const noexcept;  // local elements before this global index

  ScaleBlocks blocks_;
  Runs runs_;
  int64_t numel_ = 0;
  int64_t scales_ = 0;
  int64_t first_bucket_ = 0;
  int64_t buckets_ = 0;
};

// A bucket's norm, computed when `left` reaches 0.
struct Bucket {
  int64_t left = 0;  // elements that have not arrived in this step
  GradNorm norm;
};

// Bytes of a shard in a plane: its codes, which are the plane's elements in any dtype, and their
// scales. Each is rounded up to cache lines.
struct PlaneBytes {
  static constexpr uint64_t kAlignment = 64;
  uint64_t codes = 0;
  uint64_t scales = 0;
};
PlaneBytes plane_bytes(const StateFormatRow& row, Plane plane, const ShardIndex& shard);
// Bytes of a plane's arena before its first shard. Arenas are aligned to huge pages (to pages, if
// smaller). With equal offsets the planes of an element would share low address bits and evict each
// other from the cache: a step would take 1.5 times as long. 640 is ten cache lines.
constexpr uint64_t bytes_before(Plane plane) noexcept { return static_cast<uint64_t>(plane) * 640; }

// All shards of a rank, and their places in the arenas, one arena per plane (`offset` is
// bytes_before):
//
//   exp_avg   | offset | codes of shard 0, 1, 2 ... | scales of shard 0, 1, 2 ... |
//   grad      | offset | gradients of shard 0, 1, 2 ... | table of buckets |
class ShardMap {
 public:
  explicit ShardMap(const AdamWSpec& spec);

  struct Place {
    std::optional<uint64_t> codes;  // offset in the arena; nullopt: no such plane, or caller-owned
    uint64_t scales = 0;
  };
  const ShardIndex& index(size_t shard) const { return shards_[shard]; }
  const Place& place(size_t shard, Plane plane) const {
    return places_[shard][static_cast<size_t>(plane)];
  }
  size_t shards() const noexcept { return shards_.size(); }
  uint64_t arena_bytes(Plane plane) const { return arena_bytes_[static_cast<size_t>(plane)]; }
  uint64_t buckets_at() const noexcept { return buckets_at_; }  // offset in the gradients' arena
  uint64_t first_bucket(size_t shard) const { return first_bucket_[shard]; }
  uint64_t buckets() const { return first_bucket_.back(); }

 private:
  void lay_out(const AdamWSpec& spec, Plane plane);

  std::vector<ShardIndex> shards_;
  std::vector<std::array<Place, kPlanes>> places_;
  std::array<uint64_t, kPlanes> arena_bytes_{};
  uint64_t buckets_at_ = 0;
  std::vector<uint64_t> first_bucket_;  // per shard; last: the number of buckets
};

// Divides the elements among threads, in equal shares rounded to buckets. So the part of each arena
// that thread i steps is nearly the part that it has committed.
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
    int64_t at = 0;  // local index
  };
  const ShardMap& map_;
  std::vector<Cut> cuts_;  // thread i: [cuts_[i], cuts_[i + 1])
};

// The dtype of a plane's codes; nullopt if the format lacks the plane. (max_exp_avg_sq exists only
// for groups with `amsgrad`.)
std::optional<DType> plane_dtype(const StateFormatRow& row, Plane plane) noexcept;
Purpose plane_purpose(Plane plane) noexcept;

// Throws USAGE for options out of range, UNSUPPORTED for options that the semantics lack.
void check_options(const AdamOptions& options);

}  // namespace modicum
