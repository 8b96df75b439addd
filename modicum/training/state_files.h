// The optimizer's state in the files of a saved checkpoint. Part of the public
// header of `training`.
//
// A plane is a part of the state that has a value per element of a parameter: the master, the lower
// half of a split master, exp_avg or exp_avg_sq. Each is stored as a tensor with the parameter's
// shape and the dtype that it has in memory. 8-bit moments have one scale for each block of
// elements, in row-major order:
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
  bool is_master = false;  // the parameter's memory is the master, or its upper half
};
// The parameters of `run` that have state. The run must have an optimizer. Throws UNSUPPORTED,
// naming the parameter, as the constructor of StateFiles does.
std::vector<StateOf> state_of(const Run& run);
// The tensors of their state, sorted by name.
std::vector<TensorSpec> state_specs(std::span<const StateOf> parameters);
// A plane in a checkpoint's files: tensor FQN.suffix, and with `has_scales` also FQN.suffix_scale.
struct StoredPlane {
  Plane plane;
  std::string_view suffix;
  DType dtype;
  bool has_scales;
};
// How a checkpoint's files hold the state of a parameter. Without a master of its own the parameter
// is the master, or its upper half.
struct StateForm {
  StateFormat format = StateFormat::fp32;
  bool is_master = false;
};
// Whether a state of format `format` holds the moments, or the master, in another form.
bool is_moment_converted(const StateForm& saved, StateFormat format) noexcept;
bool is_master_converted(const StateForm& saved, StateFormat format) noexcept;
// The stored planes of a parameter in a checkpoint's files.
std::vector<StoredPlane> stored_planes(StateFormat format, bool is_master);
constexpr std::string_view kScaleSuffix = "_scale";

// Shard number `shard` of an AdamW, and the parameter's name in the files.
struct HeldShard {
  AdamW& adamw;
  size_t shard = 0;
  const std::string& fqn;
};
// Calls its argument for each shard. The names must stay valid during the whole call.
using HeldShards = FunctionRef<void(FunctionRef<void(const HeldShard&)>)>;
// Calls `fn` for the shards of `optimizer`. `to_save`: only for those of which the rank holds the
// primary replica.
void for_each_held(const RankOptimizer& optimizer, bool to_save,
                   FunctionRef<void(const HeldShard&)> fn);

// Call for a shard with 8-bit moments, of a parameter with `numel` elements. Throws UNSUPPORTED,
// naming the parameter, if the shard has only a part of a block: the ranks that share a block have
// different scales for it.
void require_whole_blocks(const ShardSpec& shard, int64_t numel);

constexpr uint64_t kStateFileBytes = 5 * kGiB;  // largest size of a file

// The tensors of a state, and their files.
class StateFiles {
 public:
  // The files in which the state of `run` is saved. The run must have an optimizer. Throws
  // UNSUPPORTED if no parameter has state, and, naming the parameter, if the layout divides a block
  // of 8-bit moments between ranks.
  explicit StateFiles(const Run& run);
  explicit StateFiles(std::span<const StateOf> parameters);
  // The files of a saved checkpoint. `saved` is the manifest of its kStateDirectory. `has_masters`:
  // false for the state of torch's optimizers, which step parameters of 16 bits themselves: their
  // masters begin with the parameters' values, and stored ones are left out.
  explicit StateFiles(Manifest saved, bool has_masters = true);

  // Throws MISMATCH, naming a tensor, unless these files hold the state of exactly the parameters
  // of `run`, or of `parameters`, in any format; UNSUPPORTED, naming the parameter, as the first
  // constructor does.
  void require_of(const Run& run) const;
  void require_of(std::span<const StateOf> parameters) const;
  // The form of a parameter's state. Throws MISMATCH if the files have no complete state of it.
  StateForm form_of(const std::string& fqn) const;
  // Whether a state of `parameters` holds a plane in another form than these files, which have the
  // state of exactly these parameters.
  bool is_converted(std::span<const StateOf> parameters) const;

  const Manifest& manifest() const noexcept { return manifest_; }
  uint64_t held_bytes() const;  // the host memory of this object
  // That of a save on each rank: of this object, the sums and the texts.
  Footprint footprint() const;
  // Calls `fn` for the spans of `shards`, whose state has the form of these files, in the order of
  // the files.
  void for_each_span(HeldShards shards, FunctionRef<void(const StoredSpan&)> fn) const;
  // The tensor FQN.suffix, which must be in the files.
  uint32_t stored(const std::string& fqn, std::string_view suffix) const;
  // Calls `fn` for the spans of a plane, or of its scales, in a shard; in the shard's order.
  struct Part {
    uint32_t stored = 0;
    Plane plane = Plane::exp_avg;
    bool is_scale = false;
  };
  void for_each_span(const HeldShard& held_shard, const Part& part,
                     FunctionRef<void(const StoredSpan&)> fn) const;

 private:
  const std::string& name_of(uint32_t stored) const { return manifest_.tensors[stored].spec.fqn; }
  void sort_names();
  // The tensor's place in by_name_; its end if there is no tensor of this name.
  std::vector<uint32_t>::const_iterator find(const std::string& name) const;
  const TensorSpec* spec_of(const std::string& fqn, std::string_view suffix) const;

  Manifest manifest_;
  std::vector<uint32_t> by_name_;  // indices in manifest_.tensors, sorted by name
  bool has_masters_ = true;
};

}  // namespace modicum
