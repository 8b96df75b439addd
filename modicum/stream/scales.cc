#include "modicum/stream/scales.h"

#include <algorithm>
#include <array>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// The number of scales that are widened to fp32 at a time, on the stack.
constexpr int64_t kScalesAtOnce = 256;

}  // namespace

ScalesAtHand scales_read(const Plan& plan, uint32_t stored, const Extent& read,
                         const std::byte* at_hand) {
  if (read.bytes() == 0) return {};
  const Stored& scales = plan.manifest->tensors[plan.manifest->tensors[stored].scale->tensor];
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
  const Stored& codes = plan.manifest->tensors[transfer.from];
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
    const int64_t into = column % block;  // codes of the first block that are before `first`
    const int64_t in_row = std::min(n, grid_.codes[1] - column);
    const int64_t blocks = std::min(kScalesAtOnce, (into + in_row - 1) / block + 1);
    // Fewer blocks than the limit reach the end of the row.
    const int64_t codes = blocks < kScalesAtOnce ? in_row : std::min(in_row, blocks * block - into);
    const int64_t scale = grid_.index_of(first) - scales_.first;
    widen_scales(scales_.bytes + scale * scale_bytes, scale_dtype_, blocks, wide.data());
    dequant({from, from_dtype_, wide.data(), into, block}, to, to_dtype_, codes, to_step);
    from += codes;
    to += codes * to_bytes;
    first += codes;
    n -= codes;
  }
}

}  // namespace modicum
