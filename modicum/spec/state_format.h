// The table of state formats: the bytes per parameter of host-side training. The only source of
// these numbers for promises, the optimizer and reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "modicum/spec/dtype.h"

namespace modicum {

enum class StateFormat : uint8_t {
  fp32,
  fp32_split,
  bf16_moments,
  int8_moments,
  int8_moments_24,
  // As bf16_moments and int8_moments, with whole masters.
  bf16_moments_fp32,
  int8_moments_fp32,
};

// The most elements that share a scale.
constexpr int64_t kScaleBlock = 128;

// The blocks of a parameter's elements that share a scale: of kScaleBlock elements each within a
// row, whose last block may be shorter. So a shard of whole rows divides no block. With rows of
// 300:
//
//   index  0 .... 128 .... 256 .. 300 .... 428 .... 556 .. 600
//   block  0      1        2      3        4        5
class ScaleBlocks {
 public:
  // 0: the whole parameter is one row.
  explicit ScaleBlocks(int64_t row) noexcept
      : row_(row % kScaleBlock == 0 ? kUncut : row), of_row_((row_ - 1) / kScaleBlock + 1) {}

  int64_t row() const noexcept { return row_; }
  int64_t block_of(int64_t index) const noexcept {
    return index / row_ * of_row_ + index % row_ / kScaleBlock;
  }
  // The first element of the block that holds element `index`.
  int64_t begin_of(int64_t index) const noexcept { return index - index % row_ % kScaleBlock; }
  // The first element at or after `index` that begins a block.
  int64_t edge_after(int64_t index) const noexcept {
    const int64_t column = index % row_;
    const int64_t in_block = column % kScaleBlock;
    return in_block == 0 ? index : index + std::min(kScaleBlock - in_block, row_ - column);
  }

 private:
  // If rows consist of whole blocks, the blocks are those of a single row.
  static constexpr int64_t kUncut = int64_t{1} << 62;
  int64_t row_;
  int64_t of_row_;
};

// A row: the dtypes held per element. 8-bit moments (i8, u8) also have one fp32 scale per block and
// moment.
struct StateFormatRow {
  StateFormat format;
  std::string_view name;  // in flags and reports
  DType master;           // f32: whole. bf16: the upper half, which is the parameter itself
  DType master_low;       // i16 or i8: the low bits of a split master; boolean: none
  DType grad;             // f32 or bf16
  DType moment;           // of exp_avg, and of exp_avg_sq: f32, bf16 or 8 bits (i8, u8)

  bool is_split() const noexcept { return master == DType::bf16; }
  bool has_scales() const noexcept { return moment == DType::i8; }
};

std::span<const StateFormatRow> all_state_formats() noexcept;
// The formats that a user can request.
std::span<const StateFormatRow> state_formats() noexcept;
const StateFormatRow& row_of(StateFormat format) noexcept;
const StateFormatRow& state_format_named(std::string_view name);  // USAGE with the nearest name

// The format of a parameter of `dtype` and `shape` if the user requests `asked`, which determines
// the moments. A bf16 parameter can be the upper half of a split master. Any other dtype has an
// fp32 master, since a split one would lose precision or range. A parameter without rows for 8-bit
// moments (see moment_row) has fp32 ones.
StateFormat state_format_of(DType dtype, std::span<const int64_t> shape,
                            StateFormat asked) noexcept;

// The elements of a row for 8-bit moments, whose blocks don't cross rows: the least product of
// trailing dims, without dim 0, that is kScaleBlock or more. 0 for parameters without such a
// product (for example vectors), and for those of fewer than kLeastCoded elements.
//
//   [4096, 14336] -> 14336    [8, 512, 100] -> 51200    [64, 3, 7, 7] -> 147
//   [4096] -> 0               [8192, 16] -> 0
int64_t moment_row(std::span<const int64_t> shape) noexcept;
constexpr int64_t kLeastCoded = 4096;

}  // namespace modicum
