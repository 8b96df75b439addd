// The door of `layout`: given targets and meshes, what a rank holds of each.
//
// A layout is rules, not lists: 64 ranks of 92,000 tensors are millions of pieces, so each is made
// when it is asked for. The rules are those of torch.chunk, DTensor, FSDP2 and DeepSpeed's ZeRO
// (docs/internals/layout.md, with worked examples). Values; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

// How ranks are arranged: sizes of the mesh axes, outermost first; rank = row-major coordinate.
struct Mesh {
  std::vector<int> sizes;

  int world_size() const noexcept;
};

// One dim of a tensor, cut among the ranks along mesh axes by torch.chunk's rule. A tensor with
// fewer dims is cut along dim 0; one without dims is not cut.
struct Cut {
  std::vector<int> axes;  // of the mesh; several are flattened into one, outermost first
  int dim = 0;            // of the tensor
  // So many parts are packed along the dim (gate and up, say), and each is cut by itself: DTensor's
  // _StridedShard with this split factor.
  int packed = 1;
  // FSDP2: along dim 0 every rank's buffer is as long as the first's, which is the longest.
  bool pads = false;

  bool operator==(const Cut&) const = default;
};

// What is done to one kind of tensor. Ranks that differ only along axes that no cut names hold the
// same.
struct Sharding {
  Mesh mesh;
  std::vector<Cut> cuts;  // as they are made: each cuts what those before it left
  bool flattens = false;  // ZeRO-3: cut as one dim of all its elements
};

// ZeRO-1/2: targets of one dtype one after the other, zeros at the end, cut evenly among all ranks.
struct FlatGroup {
  DType dtype = DType::f32;
  int64_t numel = 0;              // without the zeros
  int64_t part = 0;               // elements of each rank's buffer
  std::vector<uint32_t> targets;  // as they stand in it
  std::vector<int64_t> begins;    // of each, and the end
};

struct Layout {
  std::string name;              // as `--layout` takes it
  std::vector<Sharding> kinds;   // of one world size
  std::vector<uint8_t> kind_of;  // by target; empty: all are of the first kind
  std::vector<FlatGroup> flats;
  struct Place {
    uint32_t flat = 0;
    int64_t begin = 0;
  };
  static constexpr uint32_t kNotFlat = UINT32_MAX;
  std::vector<Place> places;  // by target; empty where there are no flats

  int world_size() const noexcept { return kinds.front().mesh.world_size(); }
  const Sharding& sharding_of(uint32_t target) const noexcept {
    return kinds[kind_of.empty() ? 0 : kind_of[target]];
  }
  bool is_flat(uint32_t target) const noexcept {
    return !places.empty() && places[target].flat != kNotFlat;
  }
  uint64_t held_bytes() const noexcept;  // host memory of what grows with the targets
};

// Targets by their numbers; null where one has no memory of its own.
using Targets = std::span<const TensorSpec* const>;

// All tensors alike. USAGE for a cut that names an axis which the mesh hasn't or names twice, for a
// dim below 0, and for a mesh without ranks.
Layout make_layout(std::string_view name, Sharding sharding);
// Adds a kind of tensors that are cut in another way, or along another mesh of the same ranks (else
// USAGE). Returns its number.
uint8_t add_kind(Layout& layout, Sharding sharding);
// Every rank holds every tensor whole.
Layout whole_layout(int world_size);
// FSDP2's one-dimensional layout: Shard(dim), padded where dim is 0.
Layout fsdp2_layout(int world_size, int shard_dim = 0);
// HSDP: `replicas` groups of `shards` ranks, rank = replica * shards + shard. Within a group
// FSDP2's layout, between groups the same. `shards` of several sizes are flattened (dp x cp).
Layout hsdp_layout(int replicas, std::vector<int> shards, int shard_dim = 0);
// Tensor parallel, then FSDP2: rank = row-major over (dp..., tp). TP cuts first, FSDP cuts what TP
// left along `shard_dim`, over all of `dp` flattened. The kinds are in the order of `TpKind`.
enum class TpKind : uint8_t { columns, rows, packed, replicated };
Layout tp_fsdp_layout(const std::vector<int>& dp, int tp, int shard_dim = 0);
// Adds a kind for experts, which have a mesh of their own over the same ranks: rank = row-major
// over (fsdp, ep). Experts (dim 0) are dealt to `ep` first, then FSDP cuts along `shard_dim`.
// Returns its number.
uint8_t add_expert_kind(Layout& layout, int fsdp, int ep, int shard_dim = 0);
// ZeRO-3: floating-point tensors flattened, ceil(numel / ranks) elements each; others, and those
// without dims, whole.
Layout zero3_layout(int world_size, Targets targets);
// ZeRO-1 and -2: one flat group per floating dtype, padded to a multiple of 2 x ranks elements,
// other targets whole. `round_robin`: targets are dealt to the ranks in turn and stand in the order
// of the ranks, as with DeepSpeed's round_robin_gradients.
Layout flat_layout(std::string_view name, int world_size, Targets targets, bool round_robin);

// [lo, hi) of a dim of `size` that index `index` of `parts` owns: torch.chunk's rule (chunks of
// ceil(size / parts), the last ones short or empty).
struct Chunk {  // no initialisers: millions of these are made
  int64_t lo, hi;

  int64_t size() const noexcept { return hi - lo; }
};
constexpr Chunk chunk_of(int64_t size, int parts, int index) noexcept {
  // Unsigned: the last chunks may begin and end behind `size`, which may be as large as 2^63-1.
  const auto chunk = static_cast<uint64_t>(ceil_div(size, parts));
  const auto whole = static_cast<uint64_t>(size);
  const uint64_t lo = static_cast<uint64_t>(index) * chunk;
  return {static_cast<int64_t>(lo < whole ? lo : whole),
          static_cast<int64_t>(lo + chunk < whole ? lo + chunk : whole)};
}

// A stretch of a rank's memory that holds (its part of) one target, or of a flat group.
// `padded_numel` elements are allocated; those past `numel` are zero.
struct LocalBuffer {
  DType dtype = DType::f32;
  int64_t numel = 0;
  int64_t padded_numel = 0;

  uint64_t bytes() const noexcept { return bytes_of(dtype, padded_numel); }
};

LocalBuffer local_buffer(const Sharding& sharding, const TensorSpec& target, int rank);
LocalBuffer local_buffer(const FlatGroup& flat, int rank) noexcept;
// Ranks of one class have buffers of the same sizes, whatever the targets: what one rank's memory
// amounts to is then what the other's does.
uint64_t buffer_class(const Layout& layout, int rank) noexcept;
// The rank's part as torch would show it: `[0, ...]` for an empty shard.
std::vector<int64_t> local_shape(const Sharding& sharding, const TensorSpec& target, int rank);

// The boxes of `target` that `rank` holds, over a shape with the target's row-major order; each
// with its place in the rank's local buffer. Empty parts give none. Returns that buffer
// (local_buffer).
LocalBuffer for_each_piece(const Sharding& sharding, const TensorSpec& target, int rank,
                           FunctionRef<void(const Box& piece)> piece);
// What `rank` holds of a target of `numel` elements that begins at element `begin` of `flat`, with
// its place in the rank's buffer; an empty box where that is nothing.
Box flat_piece(const FlatGroup& flat, int64_t begin, int64_t numel, int rank) noexcept;

// Neighbouring elements [first, first + n) of a target.
struct ElementRun {
  int64_t first = 0;
  int64_t n = 0;

  bool operator==(const ElementRun&) const = default;
};

// The elements of `target` that `rank` holds, in the order of its memory: as few runs as there can
// be, ascending. `order` names the dims by which the local elements are contiguous, slowest first
// (USAGE unless each dim is named once); elements are counted by it, too: {0, 1, ...} counts them
// row-major, {1, 0} those of a matrix column by column.
std::vector<ElementRun> runs_of(const Sharding& sharding, const TensorSpec& target, int rank,
                                std::span<const int> order);

// Of the ranks that hold the same elements of `target`, exactly one is primary: the first.
bool is_primary(const Sharding& sharding, const TensorSpec& target, int rank);

// The ranks, `rank` among them, that hold the same of every target, or of one that is cut like
// `sharding`; in order.
std::vector<int> replicas_of(const Sharding& sharding, int rank);
std::vector<int> replicas_of(const Layout& layout, int rank);

// Calls `run` with the stretches of local elements [begin, end) of a piece (counted from its own
// first one) that are neighbours in the target too; `global` is the first one's row-major index
// there, `local` its place in the rank's buffer.
void for_each_global_run(const Box& piece, int64_t begin, int64_t end,
                         FunctionRef<void(int64_t global, int64_t local, int64_t n)> run);

// Adds all that decides what the layout does.
void digest_layout(const Layout& layout, Hasher& hasher);

// Where a buffer begins in a rank's arena: each is aligned to this many bytes.
constexpr uint64_t kBufferAlignment = 64;

}  // namespace modicum
