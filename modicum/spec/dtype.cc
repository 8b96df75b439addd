#include "modicum/spec/dtype.h"

#include <array>

#include "modicum/base/base.h"

namespace modicum {
namespace {

struct Row {
  std::string_view stored;
  std::string_view torch;
  int bits;
};

constexpr std::array<Row, static_cast<size_t>(DType::count)> kDTypes = {{
    {"BOOL", "bool", 8},
    {"F4", "float4_e2m1fn_x2", 4},
    {"F6_E2M3", "float6_e2m3", 6},
    {"F6_E3M2", "float6_e3m2", 6},
    {"U8", "uint8", 8},
    {"I8", "int8", 8},
    {"F8_E5M2", "float8_e5m2", 8},
    {"F8_E4M3", "float8_e4m3fn", 8},
    {"F8_E8M0", "float8_e8m0fnu", 8},
    {"F8_E4M3FNUZ", "float8_e4m3fnuz", 8},
    {"F8_E5M2FNUZ", "float8_e5m2fnuz", 8},
    {"I16", "int16", 16},
    {"U16", "uint16", 16},
    {"F16", "float16", 16},
    {"BF16", "bfloat16", 16},
    {"I32", "int32", 32},
    {"U32", "uint32", 32},
    {"F32", "float32", 32},
    {"C64", "complex64", 64},
    {"F64", "float64", 64},
    {"I64", "int64", 64},
    {"U64", "uint64", 64},
}};

const Row& row(DType dtype) noexcept { return kDTypes[static_cast<size_t>(dtype)]; }

std::optional<DType> find(std::string_view name, std::string_view Row::*name_of) noexcept {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].*name_of == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace

std::string_view stored_name(DType dtype) noexcept { return row(dtype).stored; }
std::string_view torch_name(DType dtype) noexcept { return row(dtype).torch; }

std::optional<DType> dtype_from_stored_name(std::string_view name) noexcept {
  return find(name, &Row::stored);
}
std::optional<DType> dtype_from_torch_name(std::string_view name) noexcept {
  if (name == "fp32") return DType::f32;
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::f16;
  return find(name, &Row::torch);
}

int bits_per_element(DType dtype) noexcept { return row(dtype).bits; }

int64_t bytes_per_element(DType dtype) {
  MODICUM_ASSERT(row(dtype).bits % 8 == 0);
  return row(dtype).bits / 8;
}

bool is_floating(DType dtype) noexcept {
  const char kind = stored_name(dtype).front();
  return kind == 'F' || dtype == DType::bf16;
}

bool can_require_grad(DType dtype) noexcept { return is_floating(dtype) || dtype == DType::c64; }

bool is_castable(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

bool is_fp8_code(DType dtype) noexcept {
  return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2;
}

bool is_scale_dtype(DType dtype) noexcept {
  return is_castable(dtype) || dtype == DType::f8_e8m0 || dtype == DType::u8;
}

}  // namespace modicum
