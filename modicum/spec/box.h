// A box of a tensor's elements and their places in a destination. Layouts produce boxes, and
// recipes map them to boxes of stored tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace modicum {

// The interval [lo, hi) of one dim of `size` elements. The dim belongs to a tensor's shape, or to
// another shape with the same row-major order. Neighbours along the dim are `step` elements apart
// in the destination.
struct BoxDim {
  int64_t size;
  int64_t lo;
  int64_t hi;
  int64_t step;

  int64_t extent() const noexcept { return hi - lo; }
};

// A product of intervals, outermost dim first. The first element (every dim at lo) goes to element
// `at` of the destination. Boxes don't allocate, since plans make millions of them.
struct Box {
  static constexpr int kMaxDims = 8;

  int64_t at = 0;
  int rank = 0;                       // the number of dims
  std::array<BoxDim, kMaxDims> dims;  // only the first `rank` are initialised

  void push(const BoxDim& dim) {
    if (rank == kMaxDims) too_many_dims();
    dims[static_cast<size_t>(rank++)] = dim;
  }
  bool empty() const noexcept;
  int64_t numel() const noexcept;
  // This box with dim `d` narrowed to [lo, hi), a part of its interval; `at` is adjusted.
  Box narrowed(int d, int64_t lo, int64_t hi) const noexcept;

 private:
  [[noreturn]] static void too_many_dims();  // UNSUPPORTED
};

// The box of a whole tensor of shape `shape`, row-major from element 0 of the destination.
Box whole_box(const std::vector<int64_t>& shape);

// `count` strided runs of `length` contiguous source elements. Element (k, i), with k < count and
// i < length, is element first + k * stride + i of the source and at + k * at_stride + i * at_step
// of the destination. Rows 1 and 2, columns 2..4 of a [4, 6] source into a contiguous buffer:
//
//   source        .   .   .   .   .   .      first 8, stride 6, count 2, length 3
//                 .   . [ 8   9  10]  .      at 0, at_stride 3, at_step 1
//                 .   . [14  15  16]  .
//                 .   .   .   .   .   .
//   destination   8   9  10  14  15  16
struct Runs {
  int64_t first = 0, stride = 0, count = 1, length = 0;
  int64_t at = 0, at_stride = 0, at_step = 1;

  int64_t numel() const noexcept { return count * length; }
  // Source elements from the first to the last, gaps included.
  int64_t span() const noexcept { return (count - 1) * stride + length; }
  // Elements [i, i + n) of runs [k, k + n_runs).
  Runs part(int64_t k, int64_t n_runs, int64_t i, int64_t n) const noexcept {
    return {first + k * stride + i,           stride,    n_runs, n,
            at + k * at_stride + i * at_step, at_stride, at_step};
  }
};

// Calls `fn(const Runs&)` for the runs of a box over the source's shape, or over another shape with
// the same row-major order. Neighbouring dims are merged where possible, so that there are few
// calls.
template <typename Fn>
void for_each_runs(const Box& box, Fn&& fn);

// --- implementation ---

namespace box_detail {
struct StridedDim {
  int64_t n, from, to;  // extent, source stride, destination stride
};
struct StridedBox {
  int64_t first = 0;
  int rank = 0;
  std::array<StridedDim, Box::kMaxDims> dims;
};
StridedBox strided(const Box& box) noexcept;
}  // namespace box_detail

template <typename Fn>
void for_each_runs(const Box& box, Fn&& fn) {
  if (box.empty()) return;
  box_detail::StridedBox s = box_detail::strided(box);
  Runs runs{.first = s.first, .length = 1, .at = box.at};
  int outer = s.rank;
  if (outer > 0 && s.dims[static_cast<size_t>(outer) - 1].from == 1) {
    const auto& inner = s.dims[static_cast<size_t>(--outer)];
    runs.length = inner.n;
    runs.at_step = inner.to;
  }
  if (outer > 0) {
    const auto& middle = s.dims[static_cast<size_t>(--outer)];
    runs.count = middle.n;
    runs.stride = middle.from;
    runs.at_stride = middle.to;
  }
  std::array<int64_t, Box::kMaxDims> index{};
  for (;;) {
    fn(static_cast<const Runs&>(runs));
    int d = outer - 1;
    for (; d >= 0; --d) {
      const auto& dim = s.dims[static_cast<size_t>(d)];
      int64_t& i = index[static_cast<size_t>(d)];
      runs.first += dim.from;
      runs.at += dim.to;
      if (++i < dim.n) break;
      runs.first -= dim.n * dim.from;
      runs.at -= dim.n * dim.to;
      i = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace modicum
