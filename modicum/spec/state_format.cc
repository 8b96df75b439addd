#include "modicum/spec/state_format.h"

#include <array>

#include "modicum/spec/named.h"

namespace modicum {
namespace {

// The last column, `moment`, is the dtype of both moments, except that exp_avg_sq is u8 where
// exp_avg is i8.
constexpr std::array<StateFormatRow, 7> kStateFormats = {{
    {StateFormat::fp32, "fp32", DType::f32, DType::boolean, DType::f32, DType::f32},
    {StateFormat::fp32_split, "fp32-split", DType::bf16, DType::i16, DType::bf16, DType::f32},
    {StateFormat::bf16_moments, "bf16-moments", DType::bf16, DType::i16, DType::bf16, DType::bf16},
    {StateFormat::int8_moments, "int8-moments", DType::bf16, DType::i16, DType::bf16, DType::i8},
    {StateFormat::int8_moments_24, "int8-moments-24", DType::bf16, DType::i8, DType::bf16,
     DType::i8},
    {StateFormat::bf16_moments_fp32, "bf16-moments-fp32", DType::f32, DType::boolean, DType::f32,
     DType::bf16},
    {StateFormat::int8_moments_fp32, "int8-moments-fp32", DType::f32, DType::boolean, DType::f32,
     DType::i8},
}};
constexpr size_t kRequestable = 5;  // a user can request the first five rows

}  // namespace

std::span<const StateFormatRow> all_state_formats() noexcept { return kStateFormats; }
std::span<const StateFormatRow> state_formats() noexcept {
  return std::span(kStateFormats).first<kRequestable>();
}

const StateFormatRow& row_of(StateFormat format) noexcept {
  return kStateFormats[static_cast<size_t>(format)];
}

StateFormat state_format_of(DType dtype, std::span<const int64_t> shape,
                            StateFormat asked) noexcept {
  if (row_of(asked).has_scales() && moment_row(shape) == 0) asked = StateFormat::fp32_split;
  if (dtype == DType::bf16) return asked;
  if (row_of(asked).has_scales()) return StateFormat::int8_moments_fp32;
  return asked == StateFormat::bf16_moments ? StateFormat::bf16_moments_fp32 : StateFormat::fp32;
}

double bytes_per_parameter(DType dtype, const StateFormatRow& row, bool on_device) {
  const bool is_master = !on_device && dtype == row.master;
  const int bits = (on_device ? 0 : bits_per_element(dtype)) +
                   (is_master ? 0 : bits_per_element(row.master)) +
                   (row.is_split() ? bits_per_element(row.master_low) : 0) +
                   bits_per_element(row.grad) + 2 * bits_per_element(row.moment);
  constexpr double kScalesBytes = 2.0 * sizeof(float) / kScaleBlock;
  return bits / 8.0 + (row.has_scales() ? kScalesBytes : 0);
}

int64_t moment_row(std::span<const int64_t> shape) noexcept {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  if (numel < kLeastCoded) return 0;
  int64_t row = 1;
  for (size_t dim = shape.size(); dim > 1; --dim) {
    row *= shape[dim - 1];
    if (row >= kScaleBlock) return row;
  }
  return 0;
}

const StateFormatRow& state_format_named(std::string_view name) {
  return row_named("state format", name, state_formats());
}

}  // namespace modicum
