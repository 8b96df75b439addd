// Boxes through index maps, from a target to the stored tensors.
#include <algorithm>
#include <array>

#include "modicum/recipe/recipe.h"

namespace modicum {
namespace {

using Leaf = std::function<void(const Node& leaf, const Box& part)>;

size_t at(int d) { return static_cast<size_t>(d); }

// --- reshape: a box over one shape as boxes over another with the same row-major order ---

// A stretch of dims of `from` and of `to` with equal products: what happens inside it doesn't touch
// the rest.
struct Group {
  int from_begin, from_end;
  int to_begin, to_end;
};

struct Groups {
  std::array<Group, Box::kMaxDims + 1> of;
  int count = 0;
};

class Reshape {
 public:
  Reshape(const Box& from, const std::vector<int64_t>& to,
          const std::function<void(const Box&)>& emit)
      : from_(merged(from)), to_(to), emit_(emit) {
    find_groups();
    Box out;
    out.at = from_.at;
    group(0, out);
  }

 private:
  // Neighbouring dims whose inner one is whole and which land like one dim are one dim. Fewer dims
  // make fewer rows to walk.
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
    int i = 0;
    int j = 0;
    const int to_rank = static_cast<int>(to_.size());
    while (i < from_.rank || j < to_rank) {
      Group g{i, i, j, j};
      int64_t a = 1;
      int64_t b = 1;
      if (i < from_.rank) a = from_.dims[at(i++)].size;
      if (j < to_rank) b = to_[at(j++)];
      while (a != b) {
        if (a < b) {
          MODICUM_ASSERT(i < from_.rank);
          a *= from_.dims[at(i++)].size;
        } else {
          MODICUM_ASSERT(j < to_rank);
          b *= to_[at(j++)];
        }
      }
      g.from_end = i;
      g.to_end = j;
      MODICUM_ASSERT(groups_.count <= Box::kMaxDims);
      groups_.of[at(groups_.count++)] = g;
    }
  }

  // Appends the dims of group `g`'s share to `out`, in every way that makes, and goes on.
  void group(int g, const Box& out) {
    if (g == groups_.count) {
      emit_(out);
      return;
    }
    rows(g, groups_.of[at(g)].from_begin, 0, out);
  }

  // Walks all `from` dims of the group but the last; `base` is the linear index so far.
  void rows(int g, int d, int64_t base, const Box& out) {
    const Group& group_of = groups_.of[at(g)];
    if (d >= group_of.from_end) {  // the group is of dims of size 1
      split(g, group_of.to_begin, base, base + 1, 0, out);
      return;
    }
    const BoxDim& dim = from_.dims[at(d)];
    if (d + 1 == group_of.from_end) {
      split(g, group_of.to_begin, base * dim.size + dim.lo, base * dim.size + dim.hi, dim.step,
            out);
      return;
    }
    Box next = out;
    for (int64_t i = dim.lo; i < dim.hi; ++i, next.at += dim.step) {
      rows(g, d + 1, base * dim.size + i, next);
    }
  }

  // Writes the linear interval [lo, hi) over `to` dims d.. of the group: a partial first row, whole
  // rows, a partial last row.
  void split(int g, int d, int64_t lo, int64_t hi, int64_t step, const Box& out) {
    const Group& group_of = groups_.of[at(g)];
    if (d == group_of.to_end) {
      group(g + 1, out);
      return;
    }
    int64_t inner = 1;
    for (int k = d + 1; k < group_of.to_end; ++k) inner *= to_[at(k)];
    int64_t from = lo;
    while (from < hi) {
      const int64_t row = from / inner;
      const bool aligned = from % inner == 0 && (hi - from) >= inner;
      const int64_t to = aligned ? hi / inner * inner : std::min(hi, (row + 1) * inner);
      Box next = out;
      next.at += (from - lo) * step;
      next.push({to_[at(d)], row, aligned ? to / inner : row + 1, step * inner});
      if (aligned) {
        split(g, d + 1, 0, inner, step, next);
      } else {
        split(g, d + 1, from - row * inner, to - row * inner, step, next);
      }
      from = to;
    }
  }

  const Box from_;
  const std::vector<int64_t>& to_;
  const std::function<void(const Box&)>& emit_;
  Groups groups_;
};

bool has_shape(const Box& box, const std::vector<int64_t>& shape) {
  if (at(box.rank) != shape.size()) return false;
  for (int d = 0; d < box.rank; ++d) {
    if (box.dims[at(d)].size != shape[at(d)]) return false;
  }
  return true;
}

// --- the other ops, on a box over the node's own shape ---

class PullBack {
 public:
  PullBack(const Recipe& recipe, const Leaf& leaf, Leaves leaves)
      : nodes_(recipe.nodes), leaf_(leaf), leaves_(leaves) {}

  void pull(uint32_t id, const Box& box) const {
    const Node& node = nodes_[id];
    if (box.empty() || (node.is_made && leaves_ == Leaves::stored)) return;
    switch (node.op) {
      // A leaf is row-major itself, so any view of it will do.
      case Op::stored:
      case Op::init:
      case Op::caller: leaf_(node, box); return;
      case Op::reshape: pull(node.in[0], box); return;
      case Op::alias: break;
      default: {
        if (has_shape(box, node.shape)) return through(node, box);
        const std::function<void(const Box&)> go_on = [&](const Box& b) { through(node, b); };
        Reshape(box, node.shape, go_on);
        return;
      }
    }
    MODICUM_ASSERT(node.op != Op::alias);
  }

 private:
  void through(const Node& node, const Box& box) const {
    switch (node.op) {
      case Op::cat: return cat(node, box);
      case Op::stack: return stack(node, box);
      case Op::slice: return slice(node, box);
      case Op::permute: return permute(node, box);
      case Op::gather: return gather(node, box);
      default: MODICUM_ASSERT(false);
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
      pull(node.in[static_cast<size_t>(i)], part);
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
      part.dims[static_cast<size_t>(node.arg[at(d)])] = box.dims[at(d)];
    }
    pull(node.in[0], part);
  }

  // Runs of consecutive indices are pulled as one box each.
  void gather(const Node& node, const Box& box) const {
    const BoxDim& dim = box.dims[at(node.dim)];
    const int64_t size = nodes_[node.in[0]].shape[at(node.dim)];
    for (int64_t i = dim.lo; i < dim.hi;) {
      const int64_t first = node.arg[static_cast<size_t>(i)];
      int64_t n = 1;
      while (i + n < dim.hi && node.arg[static_cast<size_t>(i + n)] == first + n) ++n;
      Box part = box.narrowed(node.dim, i, i + n);
      part.dims[at(node.dim)] = {size, first, first + n, dim.step};
      pull(node.in[0], part);
      i += n;
    }
  }

  const std::vector<Node>& nodes_;
  const Leaf& leaf_;
  const Leaves leaves_;
};

}  // namespace

void pull_back(const Recipe& recipe, uint32_t node, const Box& box, const Leaf& leaf,
               Leaves leaves) {
  PullBack(recipe, leaf, leaves).pull(node, box);
}

}  // namespace modicum
