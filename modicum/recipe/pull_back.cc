// Maps boxes of a target through the index maps of a recipe to boxes of the stored tensors.
//
// Example: qkv [6, 4] = cat(dim 0: q [4, 4], k [2, 4]), and a rank needs rows [3, 6):
//
//   box of qkv       rows [3,6)                   at 0
//   box of q         row  [3,4)                   at 0     the rows of [3,6) that are in q's [0,4)
//   box of k         rows [0,2)                   at 4     those in k's [4,6), minus 4
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <span>

#include "modicum/recipe/at.h"
#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

using Leaf = FunctionRef<void(const Node& leaf, const Box& part)>;

// --- reshape ---

// Neighbouring dims of one shape, and neighbouring dims of another shape with the same product. A
// reshape moves indices only within such a group:
//
//   from  [4, 6 | 5]
//   to    [8, 3 | 5]      two groups: 4 x 6 = 8 x 3, and 5 = 5
struct Group {
  size_t from_begin, from_end, to_begin, to_end;
};

// Calls `fn` for each group of two shapes of equal numel > 0, from the outermost dims inward.
// A group begins with one dim of each shape. The side with the smaller product takes one more dim
// until the products are equal.
void for_each_group(std::span<const int64_t> from, std::span<const int64_t> to,
                    FunctionRef<void(const Group&)> fn) {
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() || j < to.size()) {
    Group group{i, i, j, j};
    // Past its last dim, a shape continues with dims of size 1.
    int64_t of_from = i < from.size() ? from[i++] : 1;
    int64_t of_to = j < to.size() ? to[j++] : 1;
    while (of_from != of_to) {
      if (of_from < of_to) {
        MODICUM_ASSERT(i < from.size());
        of_from *= from[i++];
      } else {
        MODICUM_ASSERT(j < to.size());
        of_to *= to[j++];
      }
    }
    group.from_end = i;
    group.to_end = j;
    fn(group);
  }
}

int64_t product_of(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Rewrites a box over one shape as boxes over another shape with the same row-major order, one
// group of dims at a time. Within a group, all dims of the box except the last are
// enumerated index by index. The results are intervals of linear indices, and each is split over
// the other shape's dims. [2, 11) over [3, 4]:
//
//            column  0  1  2  3
//   row 0            .  .  2  3     a partial first row     [0,1) x [2,4)
//   row 1            4  5  6  7     whole rows              [1,2) x [0,4)
//   row 2            8  9 10  .     a partial last row      [2,3) x [0,3)
//
// Every box of one group is combined with every box of the next.
class Reshape {
 public:
  Reshape(const Box& from, const std::vector<int64_t>& to, FunctionRef<void(const Box&)> emit)
      : from_(merged(from)), to_(to), emit_(emit) {
    find_groups();
    Box out;
    out.at = from_.at;
    group(0, out);
  }

 private:
  // Drops dims of size 1. Merges a dim whose interval is the whole dim into the dim before it, if
  // their strides in the destination allow that. With fewer dims, fewer rows must be enumerated.
  static Box merged(const Box& box) {
    Box out;
    out.at = box.at;
    for (int d = 0; d < box.rank; ++d) {
      const BoxDim& dim = box.dims[at(d)];
      if (dim.size == 1) continue;
      const bool whole = dim.lo == 0 && dim.hi == dim.size;
      BoxDim* outer = out.rank > 0 ? &out.dims[at(out.rank - 1)] : nullptr;
      if (outer != nullptr && whole && outer->step == dim.step * dim.size) {
        *outer = {outer->size * dim.size, outer->lo * dim.size, outer->hi * dim.size, dim.step};
      } else {
        out.push(dim);
      }
    }
    return out;
  }

  void find_groups() {
    std::array<int64_t, Box::kMaxDims> sizes;
    for (int d = 0; d < from_.rank; ++d) sizes[at(d)] = from_.dims[at(d)].size;
    for_each_group({sizes.data(), at(from_.rank)}, to_, [&](const Group& group) {
      MODICUM_ASSERT(group_count_ < groups_.size());
      groups_[group_count_++] = group;
    });
  }

  // Linear indices [lo, hi) of a group; neighbours are `step` elements apart in the destination.
  struct Stretch {
    int64_t lo, hi, step;
  };

  // Appends dims for group `g` and the groups after it to `out`, and emits every combination.
  void group(size_t g, const Box& out) {
    if (g == group_count_) return emit_(out);
    rows(g, groups_[g].from_begin, 0, out);
  }

  // Enumerates the group's `from` dims, from `d` to the last but one. `base` is the linear index
  // over the group's dims before `d`.
  void rows(size_t g, size_t d, int64_t base, const Box& out) {
    const size_t end = groups_[g].from_end;
    if (d == end)
      return split(g, groups_[g].to_begin, {0, 1, 0}, out);  // the `to` dims have size 1
    const BoxDim& dim = from_.dims[d];
    base *= dim.size;
    if (d + 1 == end) {
      return split(g, groups_[g].to_begin, {base + dim.lo, base + dim.hi, dim.step}, out);
    }
    Box next = out;
    for (int64_t i = dim.lo; i < dim.hi; ++i, next.at += dim.step) rows(g, d + 1, base + i, next);
  }

  // Splits the stretch over the group's `to` dims, beginning with `d`.
  void split(size_t g, size_t d, const Stretch& stretch, const Box& out) {
    const Group& current = groups_[g];
    if (d == current.to_end) return group(g + 1, out);
    const auto& [lo, hi, step] = stretch;
    const int64_t inner = product_of(std::span(to_).subspan(d + 1, current.to_end - (d + 1)));
    for (int64_t from = lo; from < hi;) {
      const int64_t row = from / inner;
      const bool whole = from % inner == 0 && hi - from >= inner;
      const int64_t to = whole ? hi / inner * inner : std::min(hi, (row + 1) * inner);
      Box next = out;
      next.at += (from - lo) * step;
      next.push({to_[d], row, whole ? to / inner : row + 1, step * inner});
      const int64_t begin = row * inner;
      split(g, d + 1, whole ? Stretch{0, inner, step} : Stretch{from - begin, to - begin, step},
            next);
      from = to;
    }
  }

  const Box from_;
  const std::vector<int64_t>& to_;
  const FunctionRef<void(const Box&)> emit_;
  std::array<Group, Box::kMaxDims + 1> groups_;
  size_t group_count_ = 0;
};

bool has_shape(const Box& box, const std::vector<int64_t>& shape) {
  if (at(box.rank) != shape.size()) return false;
  for (int d = 0; d < box.rank; ++d) {
    if (box.dims[at(d)].size != shape[at(d)]) return false;
  }
  return true;
}

// --- the other ops, on a box over the node's shape ---

class PullBack {
 public:
  PullBack(const Recipe& recipe, Leaf leaf, Leaves leaves)
      : nodes_(recipe.nodes), leaf_(leaf), leaves_(leaves) {}

  void pull(uint32_t id, const Box& box) const {
    const Node& node = nodes_[id];
    if (box.empty() || (node.is_made && leaves_ == Leaves::stored)) return;
    switch (node.op) {
      // Leaves are row-major, so the box may be over any shape with the leaf's row-major order.
      case Op::stored:
      case Op::init:
      case Op::caller: leaf_(node, box); return;
      case Op::reshape: pull(node.in[0], box); return;
      default: break;
    }
    if (has_shape(box, node.shape)) return through(node, box);
    Reshape(box, node.shape, [&](const Box& b) { through(node, b); });
  }

 private:
  void through(const Node& node, const Box& box) const {
    switch (node.op) {
      case Op::cat: return cat(node, box);
      case Op::stack: return stack(node, box);
      case Op::slice: return slice(node, box);
      case Op::permute: return permute(node, box);
      case Op::gather: return gather(node, box);
      default: MODICUM_ASSERT(false);  // an alias: callers begin at Recipe::read_node
    }
  }

  void cat(const Node& node, const Box& box) const {
    const BoxDim& dim = box.dims[at(node.dim)];
    int64_t begin = 0;
    for (const uint32_t id : node.in) {
      const int64_t size = nodes_[id].shape[at(node.dim)];
      const int64_t lo = std::max(dim.lo, begin);
      const int64_t hi = std::min(dim.hi, begin + size);
      if (lo < hi) {
        Box part = box.narrowed(node.dim, lo, hi);
        part.dims[at(node.dim)] = {size, lo - begin, hi - begin, dim.step};
        pull(id, part);
      }
      begin += size;
      if (begin >= dim.hi) return;
    }
  }

  void stack(const Node& node, const Box& box) const {
    const BoxDim dim = box.dims[at(node.dim)];
    for (int64_t i = dim.lo; i < dim.hi; ++i) {
      Box part = box;
      part.at += (i - dim.lo) * dim.step;
      for (int d = node.dim; d + 1 < part.rank; ++d) part.dims[at(d)] = part.dims[at(d + 1)];
      --part.rank;
      pull(node.in[at(i)], part);
    }
  }

  void slice(const Node& node, const Box& box) const {
    Box part = box;
    BoxDim& dim = part.dims[at(node.dim)];
    dim.lo += node.arg[0];
    dim.hi += node.arg[0];
    dim.size = nodes_[node.in[0]].shape[at(node.dim)];
    pull(node.in[0], part);
  }

  void permute(const Node& node, const Box& box) const {
    Box part = box;
    for (int d = 0; d < box.rank; ++d) {
      part.dims[at(node.arg[at(d)])] = box.dims[at(d)];
    }
    pull(node.in[0], part);
  }

  // One box per run of consecutive indices.
  void gather(const Node& node, const Box& box) const {
    const BoxDim& dim = box.dims[at(node.dim)];
    const int64_t size = nodes_[node.in[0]].shape[at(node.dim)];
    for (int64_t i = dim.lo; i < dim.hi;) {
      const int64_t first = node.arg[at(i)];
      int64_t n = 1;
      while (i + n < dim.hi && node.arg[at(i + n)] == first + n) ++n;
      Box part = box.narrowed(node.dim, i, i + n);
      part.dims[at(node.dim)] = {size, first, first + n, dim.step};
      pull(node.in[0], part);
      i += n;
    }
  }

  const std::vector<Node>& nodes_;
  const Leaf leaf_;
  const Leaves leaves_;
};

}  // namespace

void pull_back(const Recipe& recipe, uint32_t node, const Box& box, Leaf leaf, Leaves leaves) {
  PullBack(recipe, leaf, leaves).pull(node, box);
}

}  // namespace modicum
