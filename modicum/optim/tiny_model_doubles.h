// A model of three parameters for the tests of `optim`: one of several buckets, whose rows are no
// multiple of kScaleBlock; one smaller than a block of scales; one in between. It can be sharded
// for any number of ranks; shards begin where blocks begin.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "modicum/base/error_double.h"
#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"

namespace modicum {

struct TinyParameter {
  const char* fqn;
  int64_t numel;
  int group;
  int64_t row;
};
constexpr std::array<TinyParameter, 3> kTinyModel = {{
    {"embed.weight", 2 * kBucketElements + 1000, 0, 300},
    {"norm.weight", 100, 1, 0},
    {"head.weight", 30 * kScaleBlock + 1, 0, 0},
}};
constexpr std::array<StateFormat, 7> kFormats = {StateFormat::fp32,
                                                 StateFormat::fp32_split,
                                                 StateFormat::bf16_moments,
                                                 StateFormat::int8_moments,
                                                 StateFormat::int8_moments_24,
                                                 StateFormat::bf16_moments_fp32,
                                                 StateFormat::int8_moments_fp32};

inline std::string format_name(StateFormat format) { return std::string(row_of(format).name); }

// The shards of one rank.
inline AdamWSpec tiny_spec(StateFormat format, int rank = 0, int ranks = 1) {
  AdamWSpec spec{
      .format = format, .groups = {AdamOptions{.lr = 1e-2}, AdamOptions{.lr = 1e-3}}, .seed = 7};
  spec.groups[1].weight_decay = 0;
  for (const TinyParameter& parameter : kTinyModel) {
    const int64_t unit = parameter.row > 0 ? parameter.row : kScaleBlock;
    const int64_t units = ceil_div(parameter.numel, unit);
    const auto cut = [&](int r) {
      return std::min(parameter.numel, ceil_div(units * r, ranks) * unit);
    };
    ShardSpec shard{.fqn = parameter.fqn, .row = parameter.row, .group = parameter.group};
    if (cut(rank) < cut(rank + 1)) shard.runs = {{cut(rank), cut(rank + 1) - cut(rank)}};
    spec.shards.push_back(std::move(shard));
  }
  return spec;
}

// Values that depend on the parameter, `seed` and the global index only.
inline std::vector<float> tiny_values(const ShardSpec& shard, uint64_t seed) {
  std::vector<float> values;
  for (const ShardRun& run : shard.runs) {
    std::vector<float> part(static_cast<size_t>(run.n));
    synth_fill(name_hash(shard.fqn) + seed * 0x9e3779b97f4a7c15U, DType::f32, run.first, run.n,
               reinterpret_cast<std::byte*>(part.data()));
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

inline void import_tiny_masters(AdamW& state) {
  for (size_t shard = 0; shard < state.shards(); ++shard) {
    state.import_from(shard, StatePlane::master, 0, tiny_values(state.shard(shard), 1000));
  }
}

// `values`, which the caller keeps, as the gradient of elements from `at` on.
inline Piece piece_of(size_t shard, int64_t at, const std::vector<float>& values) {
  return {shard, at, static_cast<int64_t>(values.size()),
          reinterpret_cast<const std::byte*>(values.data()), DType::f32};
}

// Delivers the whole gradient of a step, parameter by parameter.
inline void deliver_tiny(AdamW& state, uint64_t step) {
  for (size_t shard = 0; shard < state.shards(); ++shard) {
    state.arrive(piece_of(shard, 0, tiny_values(state.shard(shard), step)));
  }
}

// What a skipped step must keep: the bytes of all planes but the gradients, and the step counts.
inline std::vector<std::byte> bytes_of_state(const AdamW& state) {
  std::vector<std::byte> bytes;
  for (size_t shard = 0; shard < state.shards(); ++shard) {
    for (size_t p = 0; p < kPlanes; ++p) {
      const auto plane = static_cast<Plane>(p);
      if (plane == Plane::grad) continue;
      const std::span<std::byte> codes = state.plane(shard, plane);
      const auto scales = std::as_bytes(state.scales(shard, plane));
      bytes.insert(bytes.end(), codes.begin(), codes.end());
      bytes.insert(bytes.end(), scales.begin(), scales.end());
    }
    bytes.push_back(static_cast<std::byte>(state.steps(shard)));
  }
  return bytes;
}

}  // namespace modicum
