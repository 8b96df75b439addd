#include "modicum/spec/box.h"

#include <utility>

#include "modicum/base/base.h"
#include "modicum/spec/tensor.h"

namespace modicum {

void Box::too_many_dims() {
  fail(Category::unsupported, "a tensor to be sharded or rearranged has more than 8 dims");
}

bool Box::empty() const noexcept { return numel() == 0; }

int64_t Box::numel() const noexcept {
  int64_t n = 1;
  for (int d = 0; d < rank; ++d) n *= dims[static_cast<size_t>(d)].extent();
  return n;
}

Box Box::narrowed(int d, int64_t lo, int64_t hi) const noexcept {
  Box part = *this;
  BoxDim& dim = part.dims[static_cast<size_t>(d)];
  part.at += (lo - dim.lo) * dim.step;
  dim.lo = lo;
  dim.hi = hi;
  return part;
}

Box whole_box(const std::vector<int64_t>& shape) {
  Box box;
  int64_t step = numel_of(shape);
  for (const int64_t size : shape) {
    step = size == 0 ? 0 : step / size;
    box.push({.size = size, .lo = 0, .hi = size, .step = step});
  }
  return box;
}

namespace box_detail {

StridedBox strided(const Box& box) noexcept {
  StridedBox out;
  int64_t stride = 1;
  // Innermost dim first, so that a dim can merge with the one inside it; reversed at the end.
  for (int d = box.rank - 1; d >= 0; --d) {
    const BoxDim& dim = box.dims[static_cast<size_t>(d)];
    out.first += dim.lo * stride;
    const StridedDim next{dim.extent(), stride, dim.step};
    stride *= dim.size;
    if (next.n == 1) continue;
    if (out.rank > 0) {
      StridedDim& inner = out.dims[static_cast<size_t>(out.rank) - 1];
      if (next.from == inner.n * inner.from && next.to == inner.n * inner.to) {
        inner.n *= next.n;
        continue;
      }
    }
    out.dims[static_cast<size_t>(out.rank++)] = next;
  }
  for (int i = 0, j = out.rank - 1; i < j; ++i, --j) {
    std::swap(out.dims[static_cast<size_t>(i)], out.dims[static_cast<size_t>(j)]);
  }
  return out;
}

}  // namespace box_detail

}  // namespace modicum
