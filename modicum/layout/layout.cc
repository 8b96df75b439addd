#include "modicum/layout/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

namespace modicum {
namespace {

// The index of a rank's part among the parts_of a cut.
int part_of(const Mesh& mesh, const Cut& cut, int rank) noexcept {
  int part = 0;
  for (const int axis : cut.axes) {
    int inner = 1;
    for (size_t a = static_cast<size_t>(axis) + 1; a < mesh.sizes.size(); ++a)
      inner *= mesh.sizes[a];
    const int size = mesh.sizes[static_cast<size_t>(axis)];
    part = part * size + rank / inner % size;
  }
  return part;
}

int parts_of(const Mesh& mesh, const Cut& cut) noexcept {
  int parts = 1;
  for (const int axis : cut.axes) parts *= mesh.sizes[static_cast<size_t>(axis)];
  return parts;
}

// The shape that cuts apply to: the target's, or its number of elements if it is flattened.
struct Dims {
  Dims(const Sharding& sharding, const TensorSpec& target) noexcept
      : numel(sharding.flattens ? numel_of(target.shape) : 0),
        sizes(sharding.flattens ? std::span(&numel, 1) : std::span(target.shape)) {}
  Dims(const Dims&) = delete;

  const int64_t numel;
  const std::span<const int64_t> sizes;
};

// The tensor dim that a cut applies to; -1 for a 0-d tensor.
int cut_dim(const Cut& cut, const Dims& dims) noexcept {
  if (dims.sizes.empty()) return -1;
  return cut.dim < static_cast<int>(dims.sizes.size()) ? cut.dim : 0;
}

// The indices that a rank holds along one dim, as chunks in the order of its memory. `size_` is
// their number, `padded_` the allocated size. Gate 0..3 and up 4..7 are packed along one dim. The
// first cut is for index 1 of 2 along one mesh axis, the second for index 0 of 2 along another:
//
//   whole                  [0,8)
//   cut packed 2           [2,4) [6,8)       the second half of each part
//   cut packed 1           [2,4)             places 0 and 1 of the four above
class HeldExtent {
 public:
  explicit HeldExtent(int64_t size) noexcept : size_(size), padded_(size) { parts_[0] = {0, size}; }

  void cut(const Mesh& mesh, const Cut& by, int rank, bool pads) {
    const int parts = parts_of(mesh, by);
    const int part = part_of(mesh, by, rank);
    if (by.packed == 1 && count_ == 1) {  // nearly always
      const Chunk mine = chunk_of(size_, parts, part);
      padded_ = pads ? chunk_of(size_, parts, 0).size() : mine.size();
      size_ = mine.size();
      parts_[0] = {parts_[0].lo + mine.lo, parts_[0].lo + mine.hi};
      return;
    }
    const HeldExtent whole = *this;
    count_ = 0;
    size_ = padded_ = 0;
    for (int p = 0; p < by.packed; ++p) {
      const Chunk packed = chunk_of(whole.size_, by.packed, p);
      const Chunk mine = chunk_of(packed.size(), parts, part);
      padded_ += pads ? chunk_of(packed.size(), parts, 0).size() : mine.size();
      take(whole, packed.lo + mine.lo, packed.lo + mine.hi);
    }
  }

  int64_t size() const noexcept { return size_; }
  int64_t padded() const noexcept { return padded_; }
  std::span<const Chunk> parts() const noexcept { return std::span(parts_).first(count_); }

 private:
  // Adds the indices at places [lo, hi) of `whole`. Places count through all of its chunks.
  void take(const HeldExtent& whole, int64_t lo, int64_t hi) {
    size_ += hi - lo;
    for (const Chunk& chunk : whole.parts()) {
      const int64_t from = std::max<int64_t>(lo, 0);
      const int64_t to = std::min(hi, chunk.size());
      if (from < to) push({chunk.lo + from, chunk.lo + to});
      lo -= chunk.size();
      hi -= chunk.size();
    }
  }
  void push(const Chunk& chunk) {
    if (count_ > 0 && parts_[count_ - 1].hi == chunk.lo) {
      parts_[count_ - 1].hi = chunk.hi;
      return;
    }
    if (count_ == parts_.size()) {
      fail(Category::unsupported,
           fmt::format("a shard has more than {} chunks along a dim", parts_.size()));
    }
    parts_[count_++] = chunk;
  }

  std::array<Chunk, 16> parts_;  // only the first `count_` are valid
  size_t count_ = 1;
  int64_t size_;
  int64_t padded_;
};

// Applies all cuts of dim `d` to `extent`. Returns whether the dim has any cut.
bool hold_along(const Sharding& sharding, const Dims& dims, size_t d, int rank,
                HeldExtent& extent) {
  bool is_cut = false;
  for (const Cut& cut : sharding.cuts) {
    if (cut_dim(cut, dims) != static_cast<int>(d)) continue;
    extent.cut(sharding.mesh, cut, rank, cut.pads && d == 0);
    is_cut = true;
  }
  return is_cut;
}

// The part of each dim of a target that a rank holds. Neighbouring dims without cuts are merged, so
// that a target with k cut dims has at most 2k + 1 dims in its boxes.
class ShardCutter {
 public:
  ShardCutter(const Sharding& sharding, const TensorSpec& target, int rank, bool wants_pieces)
      : buffer_{target.dtype, 1, 1} {
    const Dims dims(sharding, target);
    int64_t whole = 1;
    for (size_t d = 0; d < dims.sizes.size(); ++d) {
      HeldExtent extent(dims.sizes[d]);
      if (!hold_along(sharding, dims, d, rank, extent)) {
        whole *= dims.sizes[d];
        continue;
      }
      push_whole(whole, wants_pieces);
      whole = 1;
      buffer_.numel *= extent.size();
      buffer_.padded_numel *= extent.padded();
      if (!wants_pieces) continue;
      if (extent.parts().size() > 1) packed_.emplace_back(box_.rank, extent);
      const auto first = extent.parts().empty() ? Chunk{0, 0} : extent.parts()[0];
      extents_[static_cast<size_t>(box_.rank)] = extent.size();
      box_.push({.size = dims.sizes[d], .lo = first.lo, .hi = first.hi, .step = 1});
    }
    push_whole(whole, wants_pieces);
  }

  const LocalBuffer& buffer() const noexcept { return buffer_; }

  void pieces(FunctionRef<void(const Box&)> piece) {
    if (buffer_.numel == 0) return;
    int64_t step = 1;
    for (auto d = static_cast<size_t>(box_.rank); d-- > 0;) {
      box_.dims[d].step = step;
      step *= extents_[d];
    }
    every_part(0, box_, piece);
  }

 private:
  void push_whole(int64_t size, bool wants_pieces) {
    buffer_.numel *= size;
    buffer_.padded_numel *= size;
    if (!wants_pieces || size == 1) return;
    extents_[static_cast<size_t>(box_.rank)] = size;
    box_.push({.size = size, .lo = 0, .hi = size, .step = 1});
  }

  // Calls `piece` with a box for each combination of chunks along the packed dims.
  void every_part(size_t k, const Box& box, FunctionRef<void(const Box&)> piece) {
    if (k == packed_.size()) return piece(box);
    const auto d = static_cast<size_t>(packed_[k].first);
    Box part = box;
    for (const Chunk& chunk : packed_[k].second.parts()) {
      part.dims[d].lo = chunk.lo;
      part.dims[d].hi = chunk.hi;
      every_part(k + 1, part, piece);
      part.at += chunk.size() * part.dims[d].step;
    }
  }

  LocalBuffer buffer_;
  Box box_;
  std::array<int64_t, Box::kMaxDims + 1> extents_;
  std::vector<std::pair<int, HeldExtent>> packed_;
};

void refuse_below(int least, int got, const char* what) {
  if (got >= least) return;
  fail(Category::usage, what,
       {.expected = fmt::format("at least {}", least), .got = fmt::format("{}", got)});
}

void require_valid(const Sharding& sharding) {
  for (const int size : sharding.mesh.sizes) {
    refuse_below(1, size, "a mesh axis has no ranks");
  }
  std::vector<bool> used(sharding.mesh.sizes.size());
  for (const Cut& cut : sharding.cuts) {
    refuse_below(0, cut.dim, "a cut is along a tensor dim below 0");
    refuse_below(1, cut.packed, "a cut has fewer than 1 packed part");
    for (const int axis : cut.axes) {
      if (axis < 0 || static_cast<size_t>(axis) >= used.size()) {
        fail(Category::usage, "a cut is along an axis that the mesh does not have",
             {.expected = fmt::format("an axis in [0, {})", used.size()),
              .got = fmt::format("{}", axis)});
      }
      if (used[static_cast<size_t>(axis)]) {
        fail(Category::usage, fmt::format("two cuts are along mesh axis {}", axis));
      }
      used[static_cast<size_t>(axis)] = true;
    }
  }
}

Cut fsdp_cut(std::vector<int> axes, int dim) { return {std::move(axes), dim, 1, true}; }

std::vector<int> axes_between(size_t first, size_t end) {
  std::vector<int> axes;
  for (size_t a = first; a < end; ++a) axes.push_back(static_cast<int>(a));
  return axes;
}

// ZeRO partitions the tensors that can have a gradient: floats of a byte or more.
bool is_partitioned(const TensorSpec* target) noexcept {
  return target != nullptr && is_floating(target->dtype) && bits_per_element(target->dtype) >= 8;
}

// Orders a group as DeepSpeed's round_robin_gradients does. Empty targets are not assigned to ranks
// and come last.
//
//   targets 0 1 2 3 4, two ranks:   0 2 4 (rank 0)   1 3 (rank 1)
void order_round_robin(std::vector<uint32_t>& group, Targets targets, size_t ranks) {
  const auto first_empty = std::stable_partition(
      group.begin(), group.end(), [&](uint32_t t) { return numel_of(targets[t]->shape) > 0; });
  const auto count = static_cast<size_t>(first_empty - group.begin());
  std::vector<uint32_t> ordered;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = rank; i < count; i += ranks) ordered.push_back(group[i]);
  }
  std::copy(ordered.begin(), ordered.end(), group.begin());
}

}  // namespace

int Mesh::world_size() const noexcept {
  int product = 1;
  for (const int size : sizes) product *= size;
  return product;
}

uint64_t Layout::held_bytes() const noexcept {
  uint64_t bytes =
      heap_block_bytes(kind_of.size()) + heap_block_bytes(places.size() * sizeof(Place));
  for (const FlatGroup& flat : flats) {
    bytes += heap_block_bytes(flat.targets.size() * sizeof(uint32_t)) +
             heap_block_bytes(flat.begins.size() * sizeof(int64_t));
  }
  return bytes;
}

Layout make_layout(std::string_view name, Sharding sharding) {
  require_valid(sharding);
  Layout layout{.name = std::string(name)};
  layout.kinds.push_back(std::move(sharding));
  return layout;
}

uint8_t add_kind(Layout& layout, Sharding sharding) {
  require_valid(sharding);
  if (sharding.mesh.world_size() != layout.world_size()) {
    fail(Category::usage, "two meshes of one layout have different world sizes",
         {.expected = std::to_string(layout.world_size()),
          .got = std::to_string(sharding.mesh.world_size())});
  }
  layout.kinds.push_back(std::move(sharding));
  return static_cast<uint8_t>(layout.kinds.size() - 1);
}

Layout whole_layout(int world_size) { return make_layout("none", {.mesh = {{world_size}}}); }

Layout fsdp2_layout(int world_size, int shard_dim) {
  return make_layout("fsdp2", {.mesh = {{world_size}}, .cuts = {fsdp_cut({0}, shard_dim)}});
}

Layout hsdp_layout(int replicas, std::vector<int> shards, int shard_dim) {
  Mesh mesh{std::move(shards)};
  mesh.sizes.insert(mesh.sizes.begin(), replicas);
  const std::vector<int> axes = axes_between(1, mesh.sizes.size());
  return make_layout("hsdp", {.mesh = std::move(mesh), .cuts = {fsdp_cut(axes, shard_dim)}});
}

Layout tp_fsdp_layout(const std::vector<int>& dp, int tp, int shard_dim) {
  Mesh mesh{dp};
  mesh.sizes.push_back(tp);
  const int tp_axis = static_cast<int>(dp.size());
  const Cut by_fsdp = fsdp_cut(axes_between(0, dp.size()), shard_dim);
  const auto after = [&](std::vector<Cut> cuts) {
    cuts.push_back(by_fsdp);
    return Sharding{.mesh = mesh, .cuts = std::move(cuts)};
  };
  Layout layout = make_layout("tp-fsdp", after({{{tp_axis}, 0}}));
  add_kind(layout, after({{{tp_axis}, 1}}));
  add_kind(layout, after({{{tp_axis}, 0, 2}}));
  add_kind(layout, after({}));
  return layout;
}

uint8_t add_expert_kind(Layout& layout, int fsdp, int ep, int shard_dim) {
  return add_kind(layout, {.mesh = {{fsdp, ep}}, .cuts = {{{1}, 0}, fsdp_cut({0}, shard_dim)}});
}

Layout zero3_layout(int world_size, Targets targets) {
  Layout layout =
      make_layout("zero3", {.mesh = {{world_size}}, .cuts = {fsdp_cut({0}, 0)}, .flattens = true});
  const uint8_t whole = add_kind(layout, {.mesh = {{world_size}}});
  for (const TensorSpec* target : targets) {
    layout.kind_of.push_back(is_partitioned(target) && !target->shape.empty() ? 0 : whole);
  }
  return layout;
}

Layout flat_layout(std::string_view name, int world_size, Targets targets, bool round_robin) {
  Layout layout = make_layout(name, {.mesh = {{world_size}}});
  layout.places.assign(targets.size(), {Layout::kNotFlat, 0});
  std::vector<DType> dtypes;
  for (uint32_t t = 0; t < targets.size(); ++t) {
    if (!is_partitioned(targets[t])) continue;
    const auto found = std::find(dtypes.begin(), dtypes.end(), targets[t]->dtype);
    const auto flat = static_cast<size_t>(found - dtypes.begin());
    if (found == dtypes.end()) {
      dtypes.push_back(targets[t]->dtype);
      layout.flats.push_back({.dtype = targets[t]->dtype});
    }
    layout.flats[flat].targets.push_back(t);
  }
  for (uint32_t f = 0; f < layout.flats.size(); ++f) {
    FlatGroup& flat = layout.flats[f];
    if (round_robin) order_round_robin(flat.targets, targets, static_cast<size_t>(world_size));
    for (const uint32_t t : flat.targets) {
      flat.begins.push_back(flat.numel);
      layout.places[t] = {f, flat.numel};
      flat.numel += numel_of(targets[t]->shape);
    }
    flat.begins.push_back(flat.numel);
    flat.part = 2 * ceil_div(flat.numel, int64_t{2} * world_size);
  }
  return layout;
}

std::vector<int64_t> local_shape(const Sharding& sharding, const TensorSpec& target, int rank) {
  const Dims dims(sharding, target);
  std::vector<int64_t> shape;
  for (size_t d = 0; d < dims.sizes.size(); ++d) {
    HeldExtent extent(dims.sizes[d]);
    hold_along(sharding, dims, d, rank, extent);
    shape.push_back(extent.size());
  }
  return shape;
}

LocalBuffer local_buffer(const Sharding& sharding, const TensorSpec& target, int rank) {
  return ShardCutter(sharding, target, rank, false).buffer();
}

LocalBuffer local_buffer(const FlatGroup& flat, int rank) noexcept {
  const int64_t begin = std::min(flat.numel, rank * flat.part);
  return {flat.dtype, std::min(flat.part, flat.numel - begin), flat.part};
}

uint64_t buffer_class(const Layout& layout, int rank) noexcept {
  uint64_t key = 0;
  for (const Sharding& sharding : layout.kinds) {
    for (const Cut& cut : sharding.cuts) {
      if (cut.pads && cut.dim == 0) continue;  // padding makes all buffers equally large
      key = key * static_cast<uint64_t>(parts_of(sharding.mesh, cut)) +
            static_cast<uint64_t>(part_of(sharding.mesh, cut, rank));
    }
  }
  return key;
}

LocalBuffer for_each_piece(const Sharding& sharding, const TensorSpec& target, int rank,
                           FunctionRef<void(const Box& piece)> piece) {
  ShardCutter cutting(sharding, target, rank, true);
  cutting.pieces(piece);
  return cutting.buffer();
}

Box flat_piece(const FlatGroup& flat, int64_t begin, int64_t numel, int rank) noexcept {
  const int64_t from = rank * flat.part;
  const int64_t lo = std::max(begin, from);
  const int64_t hi = std::max(lo, std::min(begin + numel, from + flat.part));
  Box box;
  box.at = lo - from;
  box.rank = 1;
  box.dims[0] = {.size = numel, .lo = lo - begin, .hi = hi - begin, .step = 1};
  return box;
}

void for_each_global_run(const Box& piece, int64_t begin, int64_t end,
                         FunctionRef<void(int64_t global, int64_t local, int64_t n)> run) {
  // Places increase with the piece's row-major order, so the first row with an element at or after
  // `begin` is found one dim at a time, from the outermost inward.
  std::array<int64_t, Box::kMaxDims> index{};
  const int inner = piece.rank - 1;
  int64_t rest = std::max<int64_t>(0, begin - piece.at);
  for (int d = 0; d < inner; ++d) {
    const BoxDim& dim = piece.dims[static_cast<size_t>(d)];
    int64_t& i = index[static_cast<size_t>(d)];
    i = std::min(rest / dim.step, dim.extent() - 1);
    rest -= i * dim.step;
  }
  const int64_t row_size = inner < 0 ? 1 : piece.dims[static_cast<size_t>(inner)].extent();
  for (;;) {
    int64_t place = piece.at;
    int64_t global = 0;
    for (int d = 0; d < piece.rank; ++d) {
      const BoxDim& dim = piece.dims[static_cast<size_t>(d)];
      place += index[static_cast<size_t>(d)] * dim.step;
      global = global * dim.size + dim.lo + index[static_cast<size_t>(d)];
    }
    if (place >= end) return;
    const int64_t lo = std::max(begin, place);
    const int64_t hi = std::min(end, place + row_size);
    if (lo < hi) run(global + (lo - place), lo, hi - lo);
    int d = inner - 1;
    for (; d >= 0; --d) {
      if (++index[static_cast<size_t>(d)] < piece.dims[static_cast<size_t>(d)].extent()) break;
      index[static_cast<size_t>(d)] = 0;
    }
    if (d < 0) return;
  }
}

void digest_layout(const Layout& layout, Hasher& hasher) {
  // Each list is preceded by its length, so that no two layouts add the same sequence.
  const auto add_all = [&hasher](const auto& list) {
    hasher.add(list.size());
    for (const auto value : list) hasher.add(value);
  };
  hasher.add(layout.name).add(layout.kinds.size());
  for (const Sharding& sharding : layout.kinds) {
    add_all(sharding.mesh.sizes);
    hasher.add(sharding.flattens).add(sharding.cuts.size());
    for (const Cut& cut : sharding.cuts) {
      add_all(cut.axes);
      hasher.add(cut.dim).add(cut.packed).add(cut.pads);
    }
  }
  add_all(layout.kind_of);
  hasher.add(layout.flats.size());
  for (const FlatGroup& flat : layout.flats) {
    hasher.add(flat.dtype).add(flat.numel).add(flat.part);
    add_all(flat.targets);
    add_all(flat.begins);
  }
}

}  // namespace modicum
