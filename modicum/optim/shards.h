// What a rank's optimizer state is made of, as values, and what it costs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "modicum/kernels/kernels.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Neighbouring elements of a parameter in its global row-major order.
struct ShardRun {
  int64_t first = 0;
  int64_t n = 0;
  bool operator==(const ShardRun&) const = default;
};

// A rank's part of one parameter. Its local elements are those of the runs, one after another.
struct ShardSpec {
  std::string fqn;
  std::vector<ShardRun> runs;  // ascending and apart; none where the rank has nothing of it
  int group = 0;               // index into AdamWSpec::groups
  // The caller's own memory, in local order; it must outlive the state and is not charged here.
  std::byte* master = nullptr;    // instead of ours: fp32, or the bf16 half of a split master
  std::byte* out = nullptr;       // each step also writes the new parameter here, as `out_dtype`
  DType out_dtype = DType::bf16;  // bf16 or f16
  // Of the ranks that hold the same elements one counts them: in `norm` and in `digest`.
  bool counts = true;

  int64_t numel() const noexcept;
};

struct AdamWSpec {
  StateFormat format = StateFormat::fp32;
  std::vector<AdamOptions> groups = {AdamOptions{}};
  std::vector<ShardSpec> shards;
  uint64_t seed = 0;           // of the random bits: the same on every rank
  Fork fork = Fork::excluded;  // what forked children find of the state
};

// The parts of the state. Codes of 8-bit moments have their scales behind them, in the same plane.
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

// The gradient's norm is taken, and threads are given their parts, in buckets: the elements of a
// parameter whose global index divided by this is the same. A whole number of kScaleBlock.
constexpr int64_t kBucketElements = 65536;

// What the state will hold, by purpose: `master`, `grad` (the table of the buckets' norms with it)
// and `moments` (scales with them). Exactly what AdamW charges. Errors as AdamW's.
Footprint adamw_footprint(const AdamWSpec& spec);

// The same of shards that come one at a time, so that a promise needs no list of them.
class AdamWCount {
 public:
  AdamWCount(StateFormat format, std::vector<AdamOptions> groups);
  explicit AdamWCount(const AdamWSpec& spec);  // all of its shards
  // `owns_master`: no array of the caller's is the master.
  void add(const ShardSpec& shard, bool owns_master);
  Footprint footprint() const;
  // Host memory of the state's tables: what is not charged by it. About 0.5 KiB per shard.
  uint64_t held_bytes() const noexcept { return held_bytes_; }

 private:
  StateFormat format_;
  std::vector<AdamOptions> groups_;
  std::array<uint64_t, kPlanes> arena_bytes_{};
  uint64_t held_bytes_ = 0;
};

// Bytes per parameter that a step must read and write, scales too: the physical limit of its speed.
// `out`: with a low-precision copy of the new parameter.
double bytes_moved_per_parameter(StateFormat format, bool out) noexcept;

}  // namespace modicum
