// The description of a rank's optimizer state, and its footprint.
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
  int64_t row = 0;  // elements per row, at whose end a block ends (ScaleBlocks); 0: one row
  int group = 0;    // index into AdamWSpec::groups
  // Caller-owned memory in local order; it must outlive the state and is not charged to its ledger.
  std::byte* master = nullptr;  // if given, the master: fp32, or the bf16 half of a split one
  // If given, steps write the parameter here as `out_dtype` (but see StepOptions::outlet).
  std::byte* out = nullptr;
  DType out_dtype = DType::bf16;  // bf16 or f16
  // Whether this is the primary replica: only primary ones count in `norm` and `digest`.
  bool counts = true;

  int64_t numel() const noexcept;
};

struct AdamWSpec {
  StateFormat format = StateFormat::fp32;
  std::vector<AdamOptions> groups = {AdamOptions{}};
  std::vector<ShardSpec> shards;
  uint64_t seed = 0;           // seed of stochastic rounding; equal on all ranks
  Fork fork = Fork::excluded;  // how forked children see the state
};

// The arrays of the state. The scales of 8-bit moments follow their codes in the same arena.
enum class Plane : uint8_t {
  master,
  master_low,
  grad,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,  // only for groups with amsgrad
  count
};
constexpr size_t kPlanes = static_cast<size_t>(Plane::count);

// Norms are summed and work is divided among threads by buckets. A bucket consists of the blocks of
// a parameter (ScaleBlocks) whose first elements have the same global index / kBucketElements.
constexpr int64_t kBucketElements = 65536;

// Exactly the bytes that AdamW charges, by purpose: `master`, `grad` (with the table of buckets),
// `moments` (with their scales) and, with Fork::inherited, `fork`. Throws as AdamW does for groups
// and runs.
Footprint adamw_footprint(const AdamWSpec& spec);

// Computes the footprint of adamw_footprint, but without `fork`, from shards that are added one at
// a time, so that a plan needs no list of shards.
class AdamWCount {
 public:
  AdamWCount(StateFormat format, std::vector<AdamOptions> groups);
  explicit AdamWCount(const AdamWSpec& spec);  // all of its shards
  // `owns_master`: the state holds the master, not the caller; `shard.master` is ignored.
  void add(const ShardSpec& shard, bool owns_master);
  Footprint footprint() const;
  // Heap bytes of the state's tables, about 0.5 KiB per shard and 48 bytes per run. The ledger is
  // not charged for them.
  uint64_t held_bytes() const noexcept { return held_bytes_; }

 private:
  StateFormat format_;
  std::vector<AdamOptions> groups_;
  std::array<uint64_t, kPlanes> arena_bytes_{};
  uint64_t held_bytes_ = 0;
};

// Bytes per parameter that a step without amsgrad reads and writes, scales included. They limit the
// step's speed. `out`: the step also writes a 2-byte copy of the new parameter.
double bytes_moved_per_parameter(StateFormat format, bool out) noexcept;

}  // namespace modicum
