// A box of elements of a tensor and where they go: the one geometric value that layouts cut with
// and recipes pull back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace modicum {

// Along one dim of a tensor (or of any shape with the same row-major order): the half-open interval
// [lo, hi) of `size`, whose neighbours land `step` elements apart in the destination.
struct BoxDim {
  int64_t size;
  int64_t lo;
  int64_t hi;
  int64_t step;

  int64_t extent() const noexcept { return hi - lo; }
};

// The product of the intervals; its first element (every dim at lo) lands at element `at`.
// Outermost dim first. Boxes live on the stack: plans make millions of them.
struct Box {
  static constexpr int kMaxDims = 8;

  int64_t at = 0;
  int rank = 0;
  std::array<BoxDim, kMaxDims> dims;  // the first `rank` of them; the others are not even zero

  void push(const BoxDim& dim) {
    if (rank == kMaxDims) too_many_dims();
    dims[static_cast<size_t>(rank++)] = dim;
  }
  bool empty() const noexcept;
  int64_t numel() const noexcept;
  // The part of this box with dim `d` cut down to [lo, hi), which must lie within; `at` moves
  // along.
  Box narrowed(int d, int64_t lo, int64_t hi) const noexcept;

 private:
  [[noreturn]] static void too_many_dims();  // UNSUPPORTED
};

// All of `shape`, row-major from element 0 of the destination.
Box whole_box(const std::vector<int64_t>& shape);

// `count` runs of `length` neighbours in the source, evenly apart: element (k, i), k < count,
// i < length, is element first + k * stride + i of the source and at + k * at_stride + i * at_step
// of the destination.
struct Runs {
  int64_t first = 0, stride = 0, count = 1, length = 0;
  int64_t at = 0, at_stride = 0, at_step = 1;

  int64_t numel() const noexcept { return count * length; }
  // From the first element to behind the last one, in the source.
  int64_t span() const noexcept { return (count - 1) * stride + length; }
  // Of runs [k, k + n_runs) the elements [i, i + n).
  Runs part(int64_t k, int64_t n_runs, int64_t i, int64_t n) const noexcept {
    return {first + k * stride + i,           stride,    n_runs, n,
            at + k * at_stride + i * at_step, at_stride, at_step};
  }
};

// The box, whose dims are those of the source, as the fewest Runs that merging neighbouring dims
// gives. `fn(const Runs&)`.
template <typename Fn>
void for_each_runs(const Box& box, Fn&& fn);

// --- how ---

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
