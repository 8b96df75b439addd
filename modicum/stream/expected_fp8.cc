#include "modicum/stream/expected_fp8.h"

#include <bit>
#include <cmath>
#include <limits>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

// E4M3: S.EEEE.MMM, bias 7, no infinities, NaN only at S.1111.111. E5M2: S.EEEEE.MM, bias 15, with
// infinities and NaNs.
double value_of(DType dtype, uint8_t code) {
  const bool has_infinity = dtype == DType::f8_e5m2;
  const int mantissa_bits = has_infinity ? 2 : 3;
  const int bias = has_infinity ? 15 : 7;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const double sign = (code & 0x80) != 0 ? -1 : 1;
  if (has_infinity && exponent == 31 && mantissa == 0) {
    return sign * std::numeric_limits<double>::infinity();
  }
  if (has_infinity ? exponent == 31 : (code & 0x7f) == 0x7f) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const int implicit = exponent > 0 ? 1 << mantissa_bits : 0;
  return sign * std::ldexp(mantissa + implicit, std::max(exponent, 1) - bias - mantissa_bits);
}

using Values = std::array<double, 256>;

const Values& values_of(DType dtype) {
  const auto decode_all = [](DType format) {
    Values values;
    for (size_t code = 0; code < values.size(); ++code) {
      values[code] = value_of(format, static_cast<uint8_t>(code));
    }
    return values;
  };
  static const Values kE4m3 = decode_all(DType::f8_e4m3);
  static const Values kE5m2 = decode_all(DType::f8_e5m2);
  return dtype == DType::f8_e4m3 ? kE4m3 : kE5m2;
}

// Scales of the dtypes E8M0 and uint8 are exponents with bias 127; 255 is NaN in E8M0, infinity in
// uint8.
double scale_of(DType dtype, const std::byte* stored) {
  if (!is_castable(dtype)) {
    const int power = static_cast<int>(*stored) - 127;
    if (power < 128) return std::ldexp(1.0, power);
    return dtype == DType::f8_e8m0 ? std::numeric_limits<double>::quiet_NaN()
                                   : std::numeric_limits<double>::infinity();
  }
  float wide = 0;
  cast(stored, dtype, reinterpret_cast<std::byte*>(&wide), DType::f32, 1);
  return wide;
}

}  // namespace

void ExpectedFp8::fetch_row(uint32_t scales, int64_t row, int64_t columns) {
  if (row_of_ == scales && row_index_ == row) return;
  const DType dtype = plan_.manifest->tensors[scales].spec.dtype;
  const auto size = static_cast<size_t>(bytes_per_element(dtype));
  stored_row_.resize(static_cast<size_t>(columns) * size);
  expected_(scales, row * columns, columns, stored_row_);
  row_.resize(static_cast<size_t>(columns));
  for (size_t c = 0; c < row_.size(); ++c) {
    row_[c] = scale_of(dtype, stored_row_.data() + c * size);
  }
  row_of_ = scales;
  row_index_ = row;
}

std::span<const std::byte> ExpectedFp8::numbers(uint32_t stored, int64_t first,
                                                std::span<const std::byte> codes) {
  const StoredTensor& tensor = plan_.manifest->tensors[stored];
  const std::vector<int64_t>& shape = tensor.spec.shape;
  const std::vector<int64_t>& grid = plan_.manifest->tensors[tensor.scale->tensor].spec.shape;
  const bool one_for_all = numel_of(grid) == 1;
  const int64_t columns = shape.empty() ? 1 : shape.back();
  const int64_t rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  const int64_t scale_columns = one_for_all ? 1 : grid.back();
  const int64_t scale_rows = grid.size() < 2 ? 1 : grid[grid.size() - 2];
  const auto [block_rows, block_columns] = tensor.scale->block;
  const Values& values = values_of(tensor.spec.dtype);
  numbers_.resize(codes.size());
  for (size_t i = 0; i < codes.size();) {
    const int64_t element = first + static_cast<int64_t>(i);
    const int64_t matrix = element / (rows * columns);
    const int64_t row = element % (rows * columns) / columns;
    fetch_row(tensor.scale->tensor, one_for_all ? 0 : matrix * scale_rows + row / block_rows,
              scale_columns);
    for (int64_t column = element % columns; column < columns && i < codes.size(); ++column, ++i) {
      const double scale = row_[static_cast<size_t>(one_for_all ? 0 : column / block_columns)];
      // The significand of a code has up to 4 bits, that of a scale up to 24. So their product is
      // exact in double, and is rounded only once, to fp32.
      const auto product = static_cast<float>(values[static_cast<size_t>(codes[i])] * scale);
      numbers_[i] = std::isnan(product) ? std::bit_cast<float>(0x7fc00000U) : product;
    }
  }
  return std::as_bytes(std::span(numbers_));
}

}  // namespace modicum
