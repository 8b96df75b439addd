// Sums of squares of gradients.
#include <cmath>

#include "modicum/kernels/kernels.h"

// This file is compiled once per instruction set, except the part below HWY_ONCE.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "modicum/kernels/gradients.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "modicum/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// A call's elements form four streams, one after the other in memory and read concurrently, since a
// single stream keeps too few cache lines in flight. Each stream has kColumns sums; sum k takes
// every kColumns-th element, whatever the vector width. n = 3200:
//
//   stream 0: 0 ... 799          stream 1: 800 ... 1599
//   stream 2: 1600 ... 2399      stream 3: 2400 ... 3199
//
// Sum k of stream 0 has the elements k, k + 8, k + 16, ...
//
// Squares of fp32 are exact in fp64, so a fused multiply-add gives the same bits as two operations.
constexpr int64_t kStreams = 4;
constexpr int64_t kColumns = 8;
constexpr int64_t kSums = kStreams * kColumns;
constexpr int64_t kTileRows = 64;  // stay in the cache while narrow vectors pass over them again
// Two vectors per stream: with 256-bit registers all sums stay in registers.
using DoubleTag = hn::CappedTag<double, kColumns / 2>;

HWY_INLINE hn::Vec<DoubleTag> add_square(DoubleTag d, DType dtype, const std::byte* grad, int64_t i,
                                         hn::Vec<DoubleTag> sum) {
  const auto x = hn::PromoteTo(d, load_floats(hn::Rebind<float, DoubleTag>(), dtype, grad, i));
  return hn::MulAdd(x, x, sum);
}

struct Streams {
  const std::byte* grad;
  DType dtype;
  int64_t apart;  // elements from one stream's begin to the next one's
};

// Adds `rows` rows of kColumns elements of each stream, from the stream's element `begin` on.
// (s0 to s7 are no array, since C++ has no arrays of scalable vectors.)
HWY_INLINE void add_rows(const Streams& streams, int64_t begin, int64_t rows, double* sums) {
  const auto [grad, dtype, apart] = streams;
  const DoubleTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < kColumns; k += 2 * lanes) {
    double* const at = sums + k;
    auto s0 = hn::LoadU(d, at);
    auto s1 = hn::LoadU(d, at + lanes);
    auto s2 = hn::LoadU(d, at + kColumns);
    auto s3 = hn::LoadU(d, at + kColumns + lanes);
    auto s4 = hn::LoadU(d, at + 2 * kColumns);
    auto s5 = hn::LoadU(d, at + 2 * kColumns + lanes);
    auto s6 = hn::LoadU(d, at + 3 * kColumns);
    auto s7 = hn::LoadU(d, at + 3 * kColumns + lanes);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = begin + row * kColumns + k;
      s0 = add_square(d, dtype, grad, i, s0);
      s1 = add_square(d, dtype, grad, i + lanes, s1);
      s2 = add_square(d, dtype, grad, i + apart, s2);
      s3 = add_square(d, dtype, grad, i + apart + lanes, s3);
      s4 = add_square(d, dtype, grad, i + 2 * apart, s4);
      s5 = add_square(d, dtype, grad, i + 2 * apart + lanes, s5);
      s6 = add_square(d, dtype, grad, i + 3 * apart, s6);
      s7 = add_square(d, dtype, grad, i + 3 * apart + lanes, s7);
    }
    hn::StoreU(s0, d, at);
    hn::StoreU(s1, d, at + lanes);
    hn::StoreU(s2, d, at + kColumns);
    hn::StoreU(s3, d, at + kColumns + lanes);
    hn::StoreU(s4, d, at + 2 * kColumns);
    hn::StoreU(s5, d, at + 2 * kColumns + lanes);
    hn::StoreU(s6, d, at + 3 * kColumns);
    hn::StoreU(s7, d, at + 3 * kColumns + lanes);
  }
}

double sum_of_squares(const std::byte* grad, DType dtype, int64_t n) {
  double sums[kSums] = {};
  const int64_t rows = n / kSums;
  for (int64_t row = 0; row < rows; row += kTileRows) {
    add_rows({grad, dtype, rows * kColumns}, row * kColumns, std::min(kTileRows, rows - row), sums);
  }
  for (int64_t i = rows * kSums; i < n; ++i) {
    const double x = hn::GetLane(load_floats(OneLane(), dtype, grad, i));
    sums[i % kSums] += x * x;
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace modicum {
namespace {

HWY_EXPORT(sum_of_squares);

}  // namespace

GradNorm& GradNorm::operator+=(const GradNorm& other) noexcept {
  finite = finite && other.finite;
  sum_of_squares = finite ? sum_of_squares + other.sum_of_squares : 0;
  return *this;
}

double GradNorm::norm(double unscale) const noexcept { return std::sqrt(sum_of_squares) * unscale; }

GradNorm squares(const std::byte* grad, DType dtype, int64_t n) noexcept {
  const double sum = HWY_DYNAMIC_DISPATCH(sum_of_squares)(grad, dtype, n);
  // Sums of finite fp32 squares do not overflow fp64, and infinities cannot cancel, since squares
  // are positive.
  const bool finite = std::isfinite(sum);
  return {finite ? sum : 0, finite};
}

}  // namespace modicum
#endif
