// What a parameter costs while it is trained on the host: the table of state formats. Promise,
// optimizer and reports take every byte per parameter from here.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "modicum/spec/dtype.h"

namespace modicum {

enum class StateFormat : uint8_t { fp32, fp32_split, bf16_moments, int8_moments, int8_moments_24 };

// Elements that share a scale, along the parameter's own row-major order. A block never straddles
// two parameters; one that a shard cuts is stored as a shorter block.
constexpr int64_t kScaleBlock = 128;

// A row: what is held per element. Codes of moments below 16 bits (dtype u8 and i8) have one fp32
// scale per block and moment besides.
struct StateFormatRow {
  StateFormat format;
  std::string_view name;  // in flags and reports
  DType master;           // f32: whole. bf16: the upper half, which is the array that trains
  DType master_low;       // i16 or i8: what the upper half leaves out; boolean: nothing
  DType grad;             // f32 or bf16
  DType moment;           // of exp_avg, and of exp_avg_sq: f32, bf16 or 8 bits (i8, u8)

  bool is_split() const noexcept { return master == DType::bf16; }
  bool has_scales() const noexcept { return moment == DType::i8; }
};

std::span<const StateFormatRow> state_formats() noexcept;
const StateFormatRow& row_of(StateFormat format) noexcept;
const StateFormatRow& state_format_named(std::string_view name);  // USAGE with the nearest name

// The format that steps a parameter of `dtype` when the user asks for `asked`: a bf16 parameter is
// the upper half of a split master and takes any format. Every other dtype takes fp32: a split
// master would lose its precision or its range.
StateFormat state_format_of(DType dtype, StateFormat asked) noexcept;

}  // namespace modicum
