// The memory of an AdamSpan, for tests: every plane of a format, misaligned if `skew` is not 0.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {

// A plane of `bytes` that begins `skew` bytes into its vector and ends where the vector ends, so
// that a sanitizer finds accesses beyond its end.
class HeldPlane {
 public:
  HeldPlane() = default;
  HeldPlane(int64_t bytes, int skew) : bytes_(static_cast<size_t>(bytes + skew)), skew_(skew) {}
  std::byte* data() { return bytes_.data() + skew_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  int skew_ = 0;
};

struct HeldSpan {
  StateFormat format;
  int64_t first;
  int64_t n;
  int64_t row;
  HeldPlane master, master_low, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, out;
  std::vector<float> exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq_scale;
  DType grad_dtype;
  DType out_dtype = DType::bf16;

  HeldSpan(StateFormat its_format, int64_t its_first, int64_t its_n, int skew = 0,
           int64_t its_row = 0)
      : format(its_format),
        first(its_first),
        n(its_n),
        row(its_row),
        grad_dtype(row_of(format).grad) {
    const StateFormatRow& dtypes = row_of(format);
    const auto plane = [&](DType dtype) {
      return HeldPlane(n * bits_per_element(dtype) / 8, skew);
    };
    master = plane(dtypes.master);
    if (dtypes.is_split()) master_low = plane(dtypes.master_low);
    grad = plane(DType::f32);
    out = plane(DType::bf16);
    exp_avg = plane(dtypes.moment);
    exp_avg_sq = plane(dtypes.moment);
    max_exp_avg_sq = plane(dtypes.moment);
    const int64_t blocks = block_of(first + n - 1) - block_of(first) + 1;
    const size_t scales = dtypes.has_scales() && n > 0 ? static_cast<size_t>(blocks) : 0;
    exp_avg_scale.resize(scales);
    exp_avg_sq_scale.resize(scales);
    max_exp_avg_sq_scale.resize(scales);
  }

  int64_t block_of(int64_t index) const { return ScaleBlocks(row).block_of(index); }

  AdamSpan span() { return part(0, n); }

  // Elements [begin, begin + count) as a span.
  AdamSpan part(int64_t begin, int64_t count) {
    const StateFormatRow& dtypes = row_of(format);
    const auto at = [&](HeldPlane& plane, DType dtype) {
      return plane.bytes().empty() ? nullptr : plane.data() + begin * bits_per_element(dtype) / 8;
    };
    const int64_t block = block_of(first + begin) - block_of(first);
    const auto scale = [&](std::vector<float>& scales) {
      return scales.empty() ? nullptr : scales.data() + block;
    };
    AdamSpan span;
    span.format = format;
    span.parameter = 0x1234567890abcdefU;
    span.first = first + begin;
    span.n = count;
    span.row = row;
    span.master = at(master, dtypes.master);
    span.master_low = at(master_low, dtypes.master_low);
    span.grad = at(grad, grad_dtype);
    span.grad_dtype = grad_dtype;
    span.exp_avg = at(exp_avg, dtypes.moment);
    span.exp_avg_sq = at(exp_avg_sq, dtypes.moment);
    span.max_exp_avg_sq = at(max_exp_avg_sq, dtypes.moment);
    span.exp_avg_scale = scale(exp_avg_scale);
    span.exp_avg_sq_scale = scale(exp_avg_sq_scale);
    span.max_exp_avg_sq_scale = scale(max_exp_avg_sq_scale);
    span.out = at(out, out_dtype);
    span.out_dtype = out_dtype;
    return span;
  }

  // Stores gradients in grad_dtype.
  void set_grad(const std::vector<float>& values) {
    cast(reinterpret_cast<const std::byte*>(values.data()), DType::f32, grad.data(), grad_dtype, n);
  }

  // Compares what a step writes, so not the gradients.
  bool operator==(const HeldSpan& other) const {
    const auto planes = [](const HeldSpan& s) {
      return std::vector{s.master.bytes(),     s.master_low.bytes(),     s.exp_avg.bytes(),
                         s.exp_avg_sq.bytes(), s.max_exp_avg_sq.bytes(), s.out.bytes()};
    };
    return planes(*this) == planes(other) && exp_avg_scale == other.exp_avg_scale &&
           exp_avg_sq_scale == other.exp_avg_sq_scale &&
           max_exp_avg_sq_scale == other.max_exp_avg_sq_scale;
  }
};

// fp32 values with any sign and 24 random bits, scaled by powers of two from 2^-15 to 1; the same
// values as in tests/fixtures/record_adamw.py.
inline std::vector<float> spread_values(int64_t stream, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) {
    uint64_t x = ((static_cast<uint64_t>(stream) << 32) + i + 1) * 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    x ^= x >> 31;
    const auto mantissa = static_cast<float>(static_cast<int64_t>(x >> 40) - (1 << 23));
    values[i] = std::ldexp(mantissa, -23 - static_cast<int>(x & 15));
  }
  return values;
}

}  // namespace modicum
