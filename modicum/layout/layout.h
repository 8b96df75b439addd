// The public header of `layout`: the elements of each target that a rank holds. A target is a
// tensor of the loaded model.
//
// A layout consists of rules, not lists: 92,000 tensors on 64 ranks have millions of pieces, so
// each piece is computed on request. The rules are those of torch.chunk, DTensor, FSDP2 and
// DeepSpeed's ZeRO (docs/internals/layout.md has worked examples). Layouts are values; any number
// of threads may read one.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

// Sizes of the mesh axes, outermost first. A rank is the row-major index of its coordinates.
struct Mesh {
  std::vector<int> sizes;

  int world_size() const noexcept;
};

// DTensor's Shard(dim): one tensor dim, split among the ranks along mesh axes by torch.chunk's
// rule. A tensor with fewer dims is split along dim 0; a 0-d tensor is replicated.
struct Cut {
  std::vector<int> axes;  // mesh axes; several are flattened into one, outermost first
  int dim = 0;            // tensor dim
  // The number of parts packed along the dim (2 for gate and up). Each part is split separately, as
  // by DTensor's _StridedShard with this split factor. gate 0..3 and up 4..7 among two ranks:
  //
  //   packed 1   rank 0  0 1 2 3    rank 1  4 5 6 7
  //   packed 2   rank 0  0 1 4 5    rank 1  2 3 6 7
  int packed = 1;
  // Every rank's buffer is padded to the length of the longest one, as FSDP2 does. Has an effect
  // only along dim 0.
  bool pads = false;

  bool operator==(const Cut&) const = default;
};

// The placements of one kind of tensor. Ranks that differ only along axes without a cut are
// replicas.
//
// Cuts apply in order, each to the shard that the previous cuts have made: TP first, then FSDP, as
// in torch. Rows 0..9 over mesh (fsdp 2, tp 2), Cut{tp} then Cut{fsdp}; rank = fsdp * 2 + tp:
//
//   tp 0   rows 0 1 2 3 4      fsdp 0: 0 1 2 (rank 0)    fsdp 1: 3 4 (rank 2)
//   tp 1   rows 5 6 7 8 9      fsdp 0: 5 6 7 (rank 1)    fsdp 1: 8 9 (rank 3)
//
// DTensor, whose mesh order is FSDP first, calls the FSDP cut a _StridedShard.
struct Sharding {
  Mesh mesh;
  std::vector<Cut> cuts;
  bool flattens = false;  // ZeRO-3: a tensor is flattened to one dim before it is split
};

// ZeRO-1/2: the targets of one dtype concatenated, padded with zeros, split evenly among all ranks.
struct FlatGroup {
  DType dtype = DType::f32;
  int64_t numel = 0;              // without padding
  int64_t part = 0;               // elements of each rank's buffer, padding included
  std::vector<uint32_t> targets;  // in the order of the group
  std::vector<int64_t> begins;    // first element of each target in the group; last: `numel`
};

struct Layout {
  std::string name;              // a value of `--layout`
  std::vector<Sharding> kinds;   // all have the same world size
  std::vector<uint8_t> kind_of;  // by target; empty: every target is of the first kind
  std::vector<FlatGroup> flats;
  struct Place {
    uint32_t flat = 0;  // index in `flats`, or kNotFlat
    int64_t begin = 0;  // the target's first element in the flat group
  };
  static constexpr uint32_t kNotFlat = UINT32_MAX;
  std::vector<Place> places;  // by target; empty without flat groups

  int world_size() const noexcept { return kinds.front().mesh.world_size(); }
  const Sharding& sharding_of(uint32_t target) const noexcept {
    return kinds[kind_of.empty() ? 0 : kind_of[target]];
  }
  bool is_flat(uint32_t target) const noexcept {
    return !places.empty() && places[target].flat != kNotFlat;
  }
  uint64_t held_bytes() const noexcept;  // host memory of the members that grow with the targets
};

// The targets of a model; null for an alias, which has no memory.
using Targets = std::span<const TensorSpec* const>;

// One sharding for all tensors. Throws USAGE for a cut along an axis that is not in the mesh, two
// cuts along one axis, a dim below 0, fewer than one packed part, or a mesh axis without ranks.
Layout make_layout(std::string_view name, Sharding sharding);
// Adds a kind of tensors with another sharding, and returns the kind's number. Its mesh may differ.
// Throws USAGE as make_layout does, or if the world size differs.
uint8_t add_kind(Layout& layout, Sharding sharding);
// Every rank holds every tensor unsharded.
Layout whole_layout(int world_size);
// FSDP2's one-dimensional layout: Shard(dim), padded where dim is 0.
Layout fsdp2_layout(int world_size, int shard_dim = 0);
// HSDP: `replicas` groups of `shards` ranks, rank = replica * shards + shard. Each group has
// FSDP2's layout, and all groups are replicas. Several sizes in `shards` are flattened (dp x cp).
Layout hsdp_layout(int replicas, std::vector<int> shards, int shard_dim = 0);
// Tensor parallel, then FSDP2: a rank is a row-major index over (dp..., tp). TP cuts first, then
// FSDP cuts TP's shards along `shard_dim` among the flattened axes `dp`. The layout has one kind
// for each TpKind, in this order. TP cuts `columns` along dim 0, `rows` along dim 1, and each of
// the two packed parts of `packed` along dim 0; it does not cut `replicated`.
enum class TpKind : uint8_t { columns, rows, packed, replicated };
Layout tp_fsdp_layout(const std::vector<int>& dp, int tp, int shard_dim = 0);
// Adds a kind for experts, and returns its number. Experts have another mesh over the same ranks: a
// rank is a row-major index over (fsdp, ep). Experts (dim 0) are split among `ep` first, then FSDP
// cuts along `shard_dim`.
uint8_t add_expert_kind(Layout& layout, int fsdp, int ep, int shard_dim = 0);
// ZeRO-3: a floating-point tensor is flattened, and each rank's buffer has ceil(numel / ranks)
// elements. 0-d tensors and tensors of dtypes without gradients (integers, booleans, floats of less
// than a byte) are replicated.
Layout zero3_layout(int world_size, Targets targets);
// ZeRO-1 and -2: one flat group per floating dtype, padded to a multiple of 2 x ranks elements.
// Targets of dtypes without gradients are replicated. `round_robin` orders a group as DeepSpeed's
// round_robin_gradients does: the i-th target that has elements is assigned to rank i % ranks, and
// the group holds rank 0's targets first, then rank 1's, ...
Layout flat_layout(std::string_view name, int world_size, Targets targets, bool round_robin);

// The indices [lo, hi) of one dim. No initialisers, since millions of chunks are made.
struct Chunk {
  int64_t lo, hi;

  int64_t size() const noexcept { return hi - lo; }
};
// Chunk `index` of a dim of `size`, by torch.chunk's rule: chunks have ceil(size / parts) elements,
// but the last ones may be shorter or empty. 10 in 4 parts: [0, 3) [3, 6) [6, 9) [9, 10).
constexpr Chunk chunk_of(int64_t size, int parts, int index) noexcept {
  // Unsigned: `size` may be 2^63-1, and before clamping the last chunks may end beyond it.
  const auto chunk = static_cast<uint64_t>(ceil_div(size, parts));
  const auto whole = static_cast<uint64_t>(size);
  const uint64_t lo = static_cast<uint64_t>(index) * chunk;
  return {static_cast<int64_t>(lo < whole ? lo : whole),
          static_cast<int64_t>(lo + chunk < whole ? lo + chunk : whole)};
}

// The part of a rank's memory that holds its shard of one target or of a flat group. `padded_numel`
// elements are allocated; the elements past `numel` are zero.
struct LocalBuffer {
  DType dtype = DType::f32;
  int64_t numel = 0;
  int64_t padded_numel = 0;

  uint64_t bytes() const noexcept { return bytes_of(dtype, padded_numel); }
};

LocalBuffer local_buffer(const Sharding& sharding, const TensorSpec& target, int rank);
LocalBuffer local_buffer(const FlatGroup& flat, int rank) noexcept;
// A key of the rank's class. Ranks with equal keys have buffers of equal sizes for every target, so
// that memory need be computed for only one of them.
uint64_t buffer_class(const Layout& layout, int rank) noexcept;
// The shape of the rank's local tensor in torch: `[0, ...]` for an empty shard.
std::vector<int64_t> local_shape(const Sharding& sharding, const TensorSpec& target, int rank);

// Calls `piece` with the boxes of `target` that `rank` holds. A box's dims may be merged dims of
// the target, in the same row-major order. `at` and `step` are places in the rank's local buffer.
// An empty shard has no box. Returns local_buffer(sharding, target, rank).
LocalBuffer for_each_piece(const Sharding& sharding, const TensorSpec& target, int rank,
                           FunctionRef<void(const Box& piece)> piece);
// The part of a target that `rank` holds, with its place in the rank's buffer; may be empty. The
// target has `numel` elements and begins at element `begin` of `flat`.
Box flat_piece(const FlatGroup& flat, int64_t begin, int64_t numel, int rank) noexcept;

// Neighbouring elements [first, first + n) of a target.
struct ElementRun {
  int64_t first = 0;
  int64_t n = 0;

  bool operator==(const ElementRun&) const = default;
};

// The elements of `target` that `rank` holds, in the order of its memory, in as few runs as
// possible. `order` lists the dims from the slowest-varying to the fastest (USAGE unless each dim
// is listed once) and applies both to the rank's memory and to the element numbers: {0, 1, ...} is
// row-major, {1, 0} column-major. Rank 1 of two, Shard(0) of a [4, 3] matrix:
//
//   order {0, 1}   one run [6, 12)
//   order {1, 0}   [2, 4) [6, 8) [10, 12)     rows 2 and 3 of each column of 4
std::vector<ElementRun> runs_of(const Sharding& sharding, const TensorSpec& target, int rank,
                                std::span<const int> order);

// The index of a rank among the replicas that hold the same elements of `target`, in rank order.
struct ReplicaPlace {
  int index = 0;
  int count = 1;
};
ReplicaPlace replica_place(const Sharding& sharding, const TensorSpec& target, int rank);
inline bool is_primary(const Sharding& sharding, const TensorSpec& target, int rank) {
  return replica_place(sharding, target, rank).index == 0;
}

// The ranks that hold the same elements as `rank`, and `rank` itself, ascending. The first function
// is about targets of this sharding, the second about all targets of the layout.
std::vector<int> replicas_of(const Sharding& sharding, int rank);
std::vector<int> replicas_of(const Layout& layout, int rank);
// Calls `fn` once for each group of replicas of all targets, the group with the lowest rank first.
void for_each_replica_group(const Layout& layout, FunctionRef<void(std::span<const int> ranks)> fn);

// Splits the elements of `piece` at places [begin, end) of the buffer into runs that are contiguous
// in both the buffer and the target. `global` is the row-major index of a run's first element in
// the target, `local` its place in the buffer.
void for_each_global_run(const Box& piece, int64_t begin, int64_t end,
                         FunctionRef<void(int64_t global, int64_t local, int64_t n)> run);

// Adds the layout to a digest: all members but `places`, which follow from `flats`.
void digest_layout(const Layout& layout, Hasher& hasher);

// The alignment of each local buffer in the memory block that holds all buffers of a rank.
constexpr uint64_t kBufferAlignment = 64;

}  // namespace modicum
