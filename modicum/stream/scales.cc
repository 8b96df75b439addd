#include "modicum/stream/scales.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// The number of scales that are widened to fp32 at a time, on the stack.
constexpr int64_t kScalesAtOnce = 256;

constexpr uint32_t kInfinity = 0x7f800000U;

}  // namespace

ScalesAtHand scales_read(const Plan& plan, uint32_t stored, const Extent& read,
                         const std::byte* at_hand) {
  if (read.bytes() == 0) return {};
  const StoredTensor& scales = plan.manifest->tensors[plan.manifest->tensors[stored].scale->tensor];
  const auto before = static_cast<int64_t>(read.begin - scales.at.begin);
  return {at_hand, before / bytes_per_element(scales.spec.dtype)};
}

Conversion::Conversion(const Plan& plan, const Transfer& transfer,
                       const ScalesAtHand& scales) noexcept
    : from_dtype_(transfer.from_dtype),
      to_dtype_(transfer.to_dtype),
      dequantises_(transfer.dequantises()),
      scales_(scales) {
  if (!dequantises_) return;
  const StoredTensor& codes = plan.manifest->tensors[transfer.from];
  scale_dtype_ = plan.manifest->tensors[codes.scale->tensor].spec.dtype;
  grid_ = scale_grid(*plan.manifest, codes);
}

void Conversion::run(const std::byte* from, int64_t first, std::byte* to, int64_t n,
                     int64_t to_step) const noexcept {
  if (dequantises_) return dequantise(from, first, to, n, to_step);
  if (to_step == 1) return cast(from, from_dtype_, to, to_dtype_, n);
  cast_strided(from, from_dtype_, to, to_dtype_, n, to_step);
}

// Goes row by row, since the next row of codes may have another row of scales; in a row, by at most
// kScalesAtOnce blocks at a time.
void Conversion::dequantise(const std::byte* from, int64_t first, std::byte* to, int64_t n,
                            int64_t to_step) const noexcept {
  const int64_t to_bytes = to_step * bytes_per_element(to_dtype_);
  const int64_t scale_bytes = bytes_per_element(scale_dtype_);
  const int64_t block = grid_.block[1];
  std::array<float, kScalesAtOnce> wide;
  while (n > 0) {
    const int64_t column = first % grid_.codes[1];
    const int64_t skipped = column % block;  // codes of the first block that are before `first`
    const int64_t in_row = std::min(n, grid_.codes[1] - column);
    const int64_t blocks = std::min(kScalesAtOnce, (skipped + in_row - 1) / block + 1);
    // Fewer blocks than the limit reach the end of the row.
    const int64_t codes =
        blocks < kScalesAtOnce ? in_row : std::min(in_row, blocks * block - skipped);
    const int64_t scale = grid_.index_of(first) - scales_.first;
    widen_scales(scales_.bytes + scale * scale_bytes, scale_dtype_, blocks, wide.data());
    dequant({from, from_dtype_, wide.data(), skipped, block}, to, to_dtype_, codes, to_step);
    from += codes;
    to += codes * to_bytes;
    first += codes;
    n -= codes;
  }
}

float Conversion::scale_of(int64_t element) const noexcept {
  const int64_t scale = grid_.index_of(element) - scales_.first;
  float wide = 0;
  widen_scales(scales_.bytes + scale * bytes_per_element(scale_dtype_), scale_dtype_, 1, &wide);
  return wide;
}

// Few pieces have a zero or an infinity, so only the result is counted at first.
RangeLoss Conversion::loss(const std::byte* from, int64_t first, const std::byte* to, int64_t n,
                           int64_t to_step) const noexcept {
  RangeLoss sum;
  if (!can_lose_range(from_dtype_, to_dtype_)) return sum;
  const Specials result = count_specials(to, to_dtype_, n, to_step);
  if (result.zeros == 0 && result.infinities == 0) return sum;
  if (!dequantises_) return loss_at_scale(1, from, to, n, to_step);
  const int64_t to_bytes = to_step * bytes_per_element(to_dtype_);
  for (int64_t i = 0; i < n;) {  // codes of one row that have one scale
    const int64_t column = (first + i) % grid_.codes[1];
    const int64_t end = std::min(grid_.codes[1], (column / grid_.block[1] + 1) * grid_.block[1]);
    const int64_t codes = std::min(n - i, end - column);
    RangeLoss part =
        loss_at_scale(scale_of(first + i), from + i, to + i * to_bytes, codes, to_step);
    part.first_index += i;
    sum.add(part);
    i += codes;
  }
  return sum;
}

RangeLoss Conversion::loss_at_scale(float scale, const std::byte* from, const std::byte* to,
                                    int64_t n, int64_t to_step) const noexcept {
  RangeLoss loss;
  // A comparison of bits, since a flush-to-zero mode would take a denormal scale for 0.
  const uint32_t magnitude = std::bit_cast<uint32_t>(scale) & 0x7fffffffU;
  if (magnitude == 0 || magnitude >= kInfinity) return loss;  // no value that could be lost
  const Specials before = count_specials(from, from_dtype_, n);
  const Specials after = count_specials(to, to_dtype_, n, to_step);
  loss.overflowed = after.infinities - before.infinities;
  loss.underflowed = after.zeros - before.zeros;
  if (loss.overflowed == 0) return loss;
  int64_t overflowed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double value = value_at(from, from_dtype_, i) * static_cast<double>(scale);
    if (!std::isfinite(value) || !std::isinf(value_at(to, to_dtype_, i * to_step))) continue;
    if (overflowed++ == 0) {
      loss.first_index = i;
      loss.first_value = value;
    }
    loss.largest = std::max(loss.largest, std::abs(value));
  }
  return loss;
}

}  // namespace modicum
