// The door of `layout`: given a target, a mesh and placements, what a rank holds of it.
//
// A layout is rules, not lists: 64 ranks of 92,000 tensors are millions of pieces, so each is made
// when it is asked for. The rules are those of torch.chunk, DTensor and FSDP2 (docs/layout.md, with
// worked examples). Values; any thread.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

// What one mesh axis does to a tensor. Placements apply left to right: each cuts what the ones
// before it left.
struct Placement {
  enum class Kind : uint8_t { replicate, shard };
  Kind kind = Kind::replicate;
  int dim = 0;  // the tensor dim that `shard` cuts

  bool operator==(const Placement&) const = default;
};

// How ranks are arranged: sizes of the mesh axes, outermost first; rank = row-major coordinate.
struct Mesh {
  std::vector<int> sizes;

  int world_size() const noexcept;
  std::vector<int> coordinate(int rank) const;  // one per axis
};

struct Layout {
  std::string_view name;  // "none", "fsdp2", "hsdp"
  Mesh mesh;
  std::vector<Placement> placements;  // one per mesh axis
  // FSDP2 gives every rank a buffer of the largest shard's size along dim 0.
  bool pads = false;
};

// A stretch of a rank's memory that holds (its part of) one target. `padded_numel` elements are
// allocated; those past `numel` are zero.
struct LocalBuffer {
  DType dtype = DType::f32;
  int64_t numel = 0;
  int64_t padded_numel = 0;

  uint64_t bytes() const noexcept { return bytes_of(dtype, padded_numel); }
};

// One placement per mesh axis, else USAGE. The two below are what users call by name.
Layout make_layout(std::string_view name, Mesh mesh, std::vector<Placement> placements);
// Every rank holds every tensor whole.
Layout whole_layout(int world_size);
// FSDP2's one-dimensional layout: Shard(dim), padded where dim is 0. A tensor with fewer dims than
// that is cut along dim 0; one without dims is on every rank.
Layout fsdp2_layout(int world_size, int shard_dim = 0);
// HSDP: `replicas` groups of `shards` ranks, rank = replica * shards + shard. Within a group
// FSDP2's layout, between groups the same.
Layout hsdp_layout(int replicas, int shards, int shard_dim = 0);

// [lo, hi) of a dim of `size` that index `index` of `parts` owns: torch.chunk's rule (chunks of
// ceil(size / parts), the last ones short or empty).
struct Chunk {
  int64_t lo = 0;
  int64_t hi = 0;
};
constexpr Chunk chunk_of(int64_t size, int parts, int index) noexcept {
  const int64_t chunk = ceil_div(size, parts);
  const int64_t lo = index * chunk;
  return {lo < size ? lo : size, lo + chunk < size ? lo + chunk : size};
}

LocalBuffer local_buffer(const Layout& layout, const TensorSpec& target, int rank);
// Whether two ranks have buffers of the same sizes, whatever the targets: what one rank's memory
// amounts to is then what the other's does.
bool have_equal_buffers(const Layout& layout, int a, int b) noexcept;
// The rank's part as torch would show it: `[0, ...]` for an empty shard.
std::vector<int64_t> local_shape(const Layout& layout, const TensorSpec& target, int rank);

// The boxes of `target` that `rank` holds, over a shape with the target's row-major order; each
// with its place in the rank's local buffer. Empty parts give none. Returns that buffer
// (local_buffer).
LocalBuffer for_each_piece(const Layout& layout, const TensorSpec& target, int rank,
                           const std::function<void(const Box& piece)>& piece);

// Of the ranks that hold the same elements of `target`, exactly one is primary: the first.
bool is_primary(const Layout& layout, const TensorSpec& target, int rank);

// Calls `run` with the stretches of local elements [begin, end) of a piece (counted from its own
// first one) that are neighbours in the target too; `global` is the first one's row-major index
// there.
void for_each_global_run(const Box& piece, int64_t begin, int64_t end,
                         const std::function<void(int64_t global, int64_t local, int64_t n)>& run);

// Where a buffer begins in a rank's arena: each is aligned to this many bytes.
constexpr uint64_t kBufferAlignment = 64;

}  // namespace modicum
