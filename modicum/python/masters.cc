// Casts of float32 masters that were read from other programs' files.
#include <fmt/format.h>

#include <cstring>

#include "modicum/kernels/kernels.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"
#include "modicum/runs/runs.h"

namespace modicum::python {
namespace {

// The halves of a split master (docs/internals/numerics.md): the upper half is the bfloat16 value,
// rounded half up in magnitude; the lower half is added to it.
void split(std::span<const std::byte> from, bool is_upper, std::byte* to) noexcept {
  for (size_t i = 0; i < from.size() / sizeof(uint32_t); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, from.data() + i * sizeof bits, sizeof bits);
    const auto half = static_cast<uint16_t>(is_upper ? (bits + 0x8000) >> 16 : bits);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

void cast_masters(const Bytes& masters, const Bytes& to, const std::string& form) {
  const std::span<const std::byte> from =
      std::as_bytes(std::span(masters.data(), masters.nbytes()));
  auto* const out = reinterpret_cast<std::byte*>(to.data());
  const bool is_half = form == "upper" || form == "lower";
  const DType dtype = is_half ? DType::bf16 : dtype_flag(form).value_or(DType::f32);
  const auto n = static_cast<int64_t>(from.size() / sizeof(float));
  if (from.size() % sizeof(float) != 0 || bytes_of(dtype, n) != to.nbytes()) {
    fail(Category::usage, "masters are cast to memory of another size",
         {.expected = fmt::format("{} bytes", bytes_of(dtype, n)),
          .got = fmt::format("{} bytes", to.nbytes())});
  }
  without_the_lock([&] {
    if (is_half) {
      split(from, form == "upper", out);
    } else {
      cast(from.data(), DType::f32, out, dtype, n);
    }
  });
}

}  // namespace

void define_masters(nb::module_& module) {
  module.def("cast_masters", cast_masters, "masters"_a, "to"_a, "form"_a,
             "Fills `to` from the bytes of float32 `masters`. `form`: a dtype, to which they are "
             "rounded to nearest even; or \"upper\" or \"lower\", the bfloat16 or int16 half of a "
             "split master.");
}

}  // namespace modicum::python
