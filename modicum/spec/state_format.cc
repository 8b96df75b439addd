#include "modicum/spec/state_format.h"

#include <array>

#include "modicum/spec/named.h"

namespace modicum {
namespace {

// `moment` is the dtype of exp_avg; int8 codes of exp_avg_sq are unsigned.
constexpr std::array<StateFormatRow, 5> kRows = {{
    {StateFormat::fp32, "fp32", DType::f32, DType::boolean, DType::f32, DType::f32},
    {StateFormat::fp32_split, "fp32-split", DType::bf16, DType::i16, DType::bf16, DType::f32},
    {StateFormat::bf16_moments, "bf16-moments", DType::bf16, DType::i16, DType::bf16, DType::bf16},
    {StateFormat::int8_moments, "int8-moments", DType::bf16, DType::i16, DType::bf16, DType::i8},
    {StateFormat::int8_moments_24, "int8-moments-24", DType::bf16, DType::i8, DType::bf16,
     DType::i8},
}};

}  // namespace

std::span<const StateFormatRow> state_formats() noexcept { return kRows; }

const StateFormatRow& row_of(StateFormat format) noexcept {
  return kRows[static_cast<size_t>(format)];
}

StateFormat state_format_of(DType dtype, StateFormat asked) noexcept {
  return dtype == DType::bf16 ? asked : StateFormat::fp32;
}

const StateFormatRow& state_format_named(std::string_view name) {
  return row_named("state format", name, kRows);
}

}  // namespace modicum
