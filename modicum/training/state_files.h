// The optimizer's state in the files of a step. Part of the door of `training`.
//
// Every plane of the state is a tensor of the parameter's shape, in the format's own dtype, as it
// is in memory; the scales of 8-bit moments are one for each block, in the parameter's order:
//
//   w [300, 256] bf16, int8-moments
//
//     w.master_low        I16   [300, 256]
//     w.exp_avg           I8    [300, 256]
//     w.exp_avg_scale     F32   [600]
//     w.exp_avg_sq        U8    [300, 256]
//     w.exp_avg_sq_scale  F32   [600]
//
// A master that is the saved parameter itself, or its upper half, is not stored again.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/runs/runs.h"
#include "modicum/stream/stream.h"
#include "modicum/training/optimizer.h"

namespace modicum {

// A parameter that has state.
struct StateOf {
  TensorSpec parameter;
  StateFormat format = StateFormat::fp32;
  bool is_master = false;  // its memory is the master, or the upper half of one
};
// A rank's shard of an AdamW, and the parameter's name in the files.
struct HeldShard {
  AdamW& adamw;
  size_t shard = 0;
  const std::string& fqn;
};
using HeldShards = FunctionRef<void(FunctionRef<void(const HeldShard&)>)>;

// UNSUPPORTED, naming the parameter, if a shard with 8-bit moments holds a part of a block, whose
// scale no other rank knows. `numel`: of the whole parameter.
void require_whole_blocks(const ShardSpec& shard, int64_t numel);

// The tensors of a state, and their files.
class StateFiles {
 public:
  // For the parameters of `run`, which has an optimizer, in its layout. UNSUPPORTED, naming the
  // parameter, if a rank holds part of a block of 8-bit moments.
  explicit StateFiles(const Run& run);
  explicit StateFiles(std::span<const StateOf> parameters);
  // For a step that was saved, by the manifest of its kStateDirectory.
  explicit StateFiles(Manifest saved);

  // MISMATCH, naming a tensor, unless a state of `run`, or of these parameters, has these tensors,
  // no more and no fewer; UNSUPPORTED as the constructor.
  void require_of(const Run& run) const;
  void require_of(std::span<const StateOf> parameters) const;

  const Manifest& manifest() const noexcept { return manifest_; }
  // What it holds on each rank, with the sums of a save.
  Footprint footprint() const;
  // The spans of one rank's state; `to_save`: only those of which it is the primary replica.
  void for_each_span(const RankOptimizer& optimizer, bool to_save,
                     FunctionRef<void(const StoredSpan&)> fn) const;
  void for_each_span(HeldShards shards, FunctionRef<void(const StoredSpan&)> fn) const;

 private:
  void spans_of(const HeldShard& of, FunctionRef<void(const StoredSpan&)> fn) const;
  void sort_names();
  uint32_t stored(const std::string& fqn, std::string_view suffix) const;

  Manifest manifest_;
  std::vector<std::pair<std::string, uint32_t>> by_name_;
};

}  // namespace modicum
