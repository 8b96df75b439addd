// The 22 element types of a safetensors file: names, sizes, and which conversions exist.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace modicum {

enum class DType : uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
  count
};

std::string_view stored_name(DType dtype) noexcept;  // "BF16": the name in a file's header
std::string_view torch_name(DType dtype) noexcept;   // "bfloat16": the name in flags and reports
std::optional<DType> dtype_from_stored_name(std::string_view name) noexcept;
// Accepts `fp32`, `bf16` and `fp16`, too.
std::optional<DType> dtype_from_torch_name(std::string_view name) noexcept;

int bits_per_element(DType dtype) noexcept;  // 4 and 6 bits exist
// Must not be called for elements smaller than a byte.
int64_t bytes_per_element(DType dtype);
bool is_floating(DType dtype) noexcept;  // complex numbers are not
// Floating-point and complex numbers: in torch only these can require gradients.
bool can_require_grad(DType dtype) noexcept;
// fp32, bf16, fp16: the types that `--dtype` names and that are cast into each other. Integers,
// bools and the rest are never cast.
bool is_castable(DType dtype) noexcept;
// F8_E4M3 and F8_E5M2: codes that are dequantised with scales (see BlockScale).
bool is_fp8_code(DType dtype) noexcept;
// Dtypes of such scales: F32, BF16, F16, and F8_E8M0 and U8, whose byte b means 2^(b - 127).
bool is_scale_dtype(DType dtype) noexcept;

}  // namespace modicum
