// The description of a rank's optimizer state, and its footprint. Values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Contiguous elements of a parameter in global row-major order.
struct ShardRun {
  int64_t first = 0;
  int64_t n = 0;
  bool operator==(const ShardRun&) const = default;
};

// A rank's shard of one parameter. Its local elements are the runs' elements, concatenated.
struct ShardSpec {
  std::string fqn;
  std::vector<ShardRun> runs;  // ascending, disjoint; empty if the rank holds no element
  int64_t row = 0;             // elements of a row, at whose end a block ends (ScaleBlocks)
  int group = 0;               // index into AdamWSpec::groups
  // Caller-owned memory in local order; it must outlive the state and is not charged to its ledger.
  std::byte* master = nullptr;    // replaces our master: fp32, or the bf16 half of a split master
  std::byte* out = nullptr;       // each step writes the new parameter here, rounded to `out_dtype`
  DType out_dtype = DType::bf16;  // bf16 or f16
  // Whether this is the primary replica: `norm` and `digest` count each element once.
  bool counts = true;

  int64_t numel() const noexcept;
};

struct AdamWSpec {
  StateFormat format = StateFormat::fp32;
  std::vector<AdamOptions> groups = {AdamOptions{}};
  std::vector<ShardSpec> shards;
  uint64_t seed = 0;           // of stochastic rounding; equal on all ranks
  Fork fork = Fork::excluded;  // how forked children see the state
};

// The arrays of the state. The scales of 8-bit moments lie behind their codes in the same plane.
enum class Plane : uint8_t {
  master,
  master_low,
  grad,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,  // of groups with amsgrad
  count
};
constexpr size_t kPlanes = static_cast<size_t>(Plane::count);

// Norms are summed and work is divided by buckets: the blocks of a parameter (ScaleBlocks) whose
// first elements have the same global index / kBucketElements.
constexpr int64_t kBucketElements = 65536;

// Exactly the bytes that AdamW charges, by purpose: `master`, `grad` (with the table of buckets)
// and `moments` (with their scales). Errors as those of AdamW.
Footprint adamw_footprint(const AdamWSpec& spec);

// The same for shards that are added one at a time, so that a plan needs no list of them.
class AdamWCount {
 public:
  AdamWCount(StateFormat format, std::vector<AdamOptions> groups);
  explicit AdamWCount(const AdamWSpec& spec);  // all of its shards
  // `owns_master`: the master is not caller-owned.
  void add(const ShardSpec& shard, bool owns_master);
  Footprint footprint() const;
  // Heap bytes of the state's tables, which are not charged. About 0.5 KiB per shard.
  uint64_t held_bytes() const noexcept { return held_bytes_; }

 private:
  StateFormat format_;
  std::vector<AdamOptions> groups_;
  std::array<uint64_t, kPlanes> arena_bytes_{};
  uint64_t held_bytes_ = 0;
};

// Bytes per parameter that a step reads and writes, scales included: the limit of its speed.
// `out`: it also writes a low-precision copy of the new parameter.
double bytes_moved_per_parameter(StateFormat format, bool out) noexcept;

}  // namespace modicum
