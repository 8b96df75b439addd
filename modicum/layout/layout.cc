#include "modicum/layout/layout.h"

#include <algorithm>

namespace modicum {
namespace {

// The tensor dim that a shard placement cuts in this target, or -1 where it is held whole.
int cut_dim(const Placement& placement, const TensorSpec& target) noexcept {
  if (placement.kind == Placement::Kind::replicate || target.shape.empty()) return -1;
  return placement.dim < static_cast<int>(target.shape.size()) ? placement.dim : 0;
}

int coordinate_of(const Mesh& mesh, int rank, size_t axis) noexcept {
  for (size_t a = mesh.sizes.size(); a-- > axis + 1;) rank /= mesh.sizes[a];
  return axis == 0 ? rank : rank % mesh.sizes[axis];
}

bool is_cut(const Layout& layout, const TensorSpec& target, int dim) noexcept {
  for (const Placement& placement : layout.placements) {
    if (cut_dim(placement, target) == dim) return true;
  }
  return false;
}

// What a rank holds along one dim, and the most that any rank does.
struct Held {
  Chunk chunk;
  int64_t most = 0;

  int64_t size() const noexcept { return chunk.hi - chunk.lo; }
};

// Chunks of chunks, left to right. The first chunk is the largest, at every axis.
Held held_along(const Layout& layout, const TensorSpec& target, int rank, int dim) noexcept {
  const int64_t size = target.shape[static_cast<size_t>(dim)];
  Held held{{0, size}, size};
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    if (cut_dim(layout.placements[axis], target) != dim) continue;
    const Chunk part =
        chunk_of(held.size(), layout.mesh.sizes[axis], coordinate_of(layout.mesh, rank, axis));
    held.chunk = {held.chunk.lo + part.lo, held.chunk.lo + part.hi};
    held.most = ceil_div(held.most, layout.mesh.sizes[axis]);
  }
  return held;
}

// The buffer of a rank and, where `box` is given, the piece in it. Neighbouring dims that nothing
// cuts are one dim of the box: at most kMaxDims stay however many there are.
LocalBuffer cut(const Layout& layout, const TensorSpec& target, int rank, Box* box) {
  LocalBuffer buffer{target.dtype, 1, 1};
  int64_t whole = 1;
  const auto push_whole = [&] {
    if (box != nullptr && whole != 1) box->push({.size = whole, .lo = 0, .hi = whole});
    whole = 1;
  };
  for (size_t d = 0; d < target.shape.size(); ++d) {
    const int64_t size = target.shape[d];
    if (!is_cut(layout, target, static_cast<int>(d))) {
      whole *= size;
      buffer.numel *= size;
      buffer.padded_numel *= size;
      continue;
    }
    push_whole();
    const Held held = held_along(layout, target, rank, static_cast<int>(d));
    if (box != nullptr) box->push({.size = size, .lo = held.chunk.lo, .hi = held.chunk.hi});
    buffer.numel *= held.size();
    buffer.padded_numel *= layout.pads && d == 0 ? held.most : held.size();
  }
  push_whole();
  if (box == nullptr) return buffer;
  int64_t step = 1;
  for (int d = box->rank - 1; d >= 0; --d) {
    BoxDim& dim = box->dims[static_cast<size_t>(d)];
    dim.step = step;
    step *= dim.extent();
  }
  return buffer;
}

}  // namespace

int Mesh::world_size() const noexcept {
  int product = 1;
  for (const int size : sizes) product *= size;
  return product;
}

std::vector<int> Mesh::coordinate(int rank) const {
  std::vector<int> coordinate;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    coordinate.push_back(coordinate_of(*this, rank, axis));
  }
  return coordinate;
}

Layout make_layout(std::string_view name, Mesh mesh, std::vector<Placement> placements) {
  if (mesh.sizes.size() != placements.size()) {
    fail(Category::usage, "a layout has one placement per mesh axis");
  }
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (mesh.sizes[axis] < 1) fail(Category::usage, "a mesh axis has no ranks");
    if (placements[axis].dim < 0) fail(Category::usage, "a tensor dim is below 0");
  }
  return {name, std::move(mesh), std::move(placements), false};
}

Layout whole_layout(int world_size) {
  return make_layout("none", {{world_size}}, {{Placement::Kind::replicate, 0}});
}

Layout hsdp_layout(int replicas, int shards, int shard_dim) {
  Layout layout =
      make_layout("hsdp", {{replicas, shards}},
                  {{Placement::Kind::replicate, 0}, {Placement::Kind::shard, shard_dim}});
  layout.pads = true;
  return layout;
}

Layout fsdp2_layout(int world_size, int shard_dim) {
  Layout layout = make_layout("fsdp2", {{world_size}}, {{Placement::Kind::shard, shard_dim}});
  layout.pads = true;
  return layout;
}

std::vector<int64_t> local_shape(const Layout& layout, const TensorSpec& target, int rank) {
  std::vector<int64_t> shape = target.shape;
  for (size_t d = 0; d < shape.size(); ++d) {
    shape[d] = held_along(layout, target, rank, static_cast<int>(d)).size();
  }
  return shape;
}

LocalBuffer local_buffer(const Layout& layout, const TensorSpec& target, int rank) {
  return cut(layout, target, rank, nullptr);
}

bool have_equal_buffers(const Layout& layout, int a, int b) noexcept {
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const Placement& placement = layout.placements[axis];
    const bool sizes_differ =
        placement.kind == Placement::Kind::shard && !(layout.pads && placement.dim == 0);
    if (sizes_differ &&
        coordinate_of(layout.mesh, a, axis) != coordinate_of(layout.mesh, b, axis)) {
      return false;
    }
  }
  return true;
}

LocalBuffer for_each_piece(const Layout& layout, const TensorSpec& target, int rank,
                           const std::function<void(const Box& piece)>& piece) {
  Box box;
  const LocalBuffer buffer = cut(layout, target, rank, &box);
  if (buffer.numel > 0) piece(box);
  return buffer;
}

void for_each_global_run(const Box& piece, int64_t begin, int64_t end,
                         const std::function<void(int64_t global, int64_t local, int64_t n)>& run) {
  const int inner = piece.rank - 1;
  const int64_t row = inner < 0 ? 1 : piece.dims[static_cast<size_t>(inner)].extent();
  for (int64_t local = begin; local < end;) {
    const int64_t column = local % row;
    const int64_t n = std::min(row - column, end - local);
    int64_t rest = local / row;
    int64_t stride = 1;
    int64_t global = 0;
    for (int d = inner; d >= 0; --d) {
      const BoxDim& dim = piece.dims[static_cast<size_t>(d)];
      const int64_t index = d == inner ? column : rest % dim.extent();
      if (d != inner) rest /= dim.extent();
      global += (dim.lo + index) * stride;
      stride *= dim.size;
    }
    run(global, local, n);
    local += n;
  }
}

bool is_primary(const Layout& layout, const TensorSpec& target, int rank) {
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    if (cut_dim(layout.placements[axis], target) < 0 &&
        coordinate_of(layout.mesh, rank, axis) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace modicum
