// The table of state formats: the bytes per parameter of host-side training. The only source of
// these numbers for promises, the optimizer and reports.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "modicum/spec/dtype.h"

namespace modicum {

enum class StateFormat : uint8_t { fp32, fp32_split, bf16_moments, int8_moments, int8_moments_24 };

// Elements that share a scale, in the parameter's row-major order. A block never spans two
// parameters; a block cut by a shard boundary is stored as two shorter ones.
constexpr int64_t kScaleBlock = 128;

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

std::span<const StateFormatRow> state_formats() noexcept;
const StateFormatRow& row_of(StateFormat format) noexcept;
const StateFormatRow& state_format_named(std::string_view name);  // USAGE with the nearest name

// The format of a parameter of `dtype` when the user asks for `asked`. A bf16 parameter can be the
// upper half of a split master, so it takes any format. Every other dtype takes fp32, since a split
// master would lose precision or range.
StateFormat state_format_of(DType dtype, StateFormat asked) noexcept;

}  // namespace modicum
