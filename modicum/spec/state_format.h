// The table of state formats: the dtypes of an optimizer's state, and so its bytes per parameter.
// Promises, the optimizer and reports all take these numbers from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "modicum/spec/dtype.h"

namespace modicum {

enum class StateFormat : uint8_t {
  fp32,             // fp32 masters, gradients and moments
  fp32_split,       // a bf16 parameter as the upper half of its fp32 master; bf16 gradients
  bf16_moments,     // as fp32_split, with bf16 moments
  int8_moments,     // as fp32_split, with 8-bit moments
  int8_moments_24,  // as int8_moments, with masters of 24 bits
  // bf16_moments and int8_moments with fp32 masters in place of split ones.
  bf16_moments_fp32,
  int8_moments_fp32,
};

// The most elements that share a scale.
constexpr int64_t kScaleBlock = 128;

// The blocks of a parameter's elements that share a scale. Each row is divided into blocks of
// kScaleBlock elements; its last block may be shorter. So a shard of whole rows splits no block.
// With rows of 300:
//
//   index  0 .... 128 .... 256 .. 300 .... 428 .... 556 .. 600
//   block  0      1        2      3        4        5
class ScaleBlocks {
 public:
  // `row`: elements per row; 0 if the whole parameter is one row.
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
  // A row length for parameters whose blocks can be counted as in one long row: rows that consist
  // of complete blocks.
  static constexpr int64_t kUncut = int64_t{1} << 62;
  int64_t row_;
  int64_t of_row_;  // blocks per row
};

// The dtypes that a format holds per element. 8-bit moments (i8, u8) also have one fp32 scale per
// block and moment.
struct StateFormatRow {
  StateFormat format;
  std::string_view name;  // in flags and reports
  DType master;           // f32: not split. bf16: the upper half, which is the parameter itself
  DType master_low;       // i16 or i8: the low bits of a split master; boolean: none
  DType grad;             // f32 or bf16
  DType moment;           // of both moments: f32 or bf16; i8: exp_avg is i8, exp_avg_sq u8

  bool is_split() const noexcept { return master == DType::bf16; }
  bool has_scales() const noexcept { return moment == DType::i8; }
  int master_bits() const noexcept {
    return bits_per_element(master) + (is_split() ? bits_per_element(master_low) : 0);
  }
};

std::span<const StateFormatRow> all_state_formats() noexcept;
// The formats that a user can request.
std::span<const StateFormatRow> state_formats() noexcept;
const StateFormatRow& row_of(StateFormat format) noexcept;
const StateFormatRow& state_format_named(std::string_view name);  // USAGE with the nearest name

// The format of a parameter of `dtype` and `shape` if the user requests `asked`. A bf16 parameter
// has that format, since it can be the upper half of a split master. Any other dtype has the same
// moments with an fp32 master, since a split one would lose precision or range. A parameter without
// rows for 8-bit moments (see moment_row) has fp32 moments in their place.
StateFormat state_format_of(DType dtype, std::span<const int64_t> shape,
                            StateFormat asked) noexcept;

// Bytes per parameter that training holds: the parameter itself, unless it is on a device, its
// gradient and the optimizer's state. `row`: the format of the parameter itself (state_format_of).
// With 8-bit moments, rows are counted as multiples of kScaleBlock.
//
//   f32 with fp32: 4 + 4 + 8 = 16    bf16 with fp32-split: 2 + 2 + 2 + 8 = 14
double bytes_per_parameter(DType dtype, const StateFormatRow& row, bool on_device);

// The row length for 8-bit moments, whose blocks don't cross rows: the least product of trailing
// dims, dim 0 excluded, that is at least kScaleBlock. 0 if there is no such product (vectors, for
// example) or the parameter has fewer than kLeastCoded elements.
//
//   [4096, 14336] -> 14336    [8, 512, 100] -> 51200    [64, 3, 7, 7] -> 147
//   [4096] -> 0               [8192, 16] -> 0
int64_t moment_row(std::span<const int64_t> shape) noexcept;
constexpr int64_t kLeastCoded = 4096;  // the least numel of a parameter with 8-bit moments

}  // namespace modicum
