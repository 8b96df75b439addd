// Casts between fp32, bf16 and fp16, one element per iteration and without branches, so that the
// compiler turns every contiguous loop into vector code. Elements are moved with memcpy: pointers
// need no alignment and no type is punned.
//
// fp32 -> bf16 is integer arithmetic, because the hardware instructions flush denormals. fp16 uses
// one exact or correctly rounded float operation, since SSE2 lacks per-element shift counts.
// Neither depends on the flush-to-zero mode.
#include <cassert>
#include <cstring>

#include "modicum/kernels/floats.h"
#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

template <typename From, typename To>
struct ContiguousCast {
  const std::byte* from;
  std::byte* to;
  int64_t n;

  MODICUM_INLINE void operator()() const noexcept {
    const std::byte* __restrict source = from;
    std::byte* __restrict target = to;
    const int64_t count = n;
    for (int64_t i = 0; i < count; ++i) {
      store(target, i, To::narrow(From::widen(load<typename From::Bits>(source, i))));
    }
  }
};

template <typename From, typename To>
void convert(const std::byte* from, std::byte* to, int64_t n, int64_t to_step) noexcept {
  if (to_step == 1) return run_widest(ContiguousCast<From, To>{from, to, n});
  for (int64_t i = 0; i < n; ++i) {
    store(to, i * to_step, To::narrow(From::widen(load<typename From::Bits>(from, i))));
  }
}

template <typename From>
void convert_from(const std::byte* from, std::byte* to, DType to_dtype, int64_t n,
                  int64_t to_step) noexcept {
  switch (to_dtype) {
    case DType::f32: return convert<From, Fp32>(from, to, n, to_step);
    case DType::bf16: return convert<From, Bf16>(from, to, n, to_step);
    case DType::f16: return convert<From, Fp16>(from, to, n, to_step);
    default: assert(!"cast to a dtype that is never cast");
  }
}

template <typename Bits>
void spread(const std::byte* __restrict from, std::byte* __restrict to, int64_t n,
            int64_t to_step) noexcept {
  for (int64_t i = 0; i < n; ++i) store(to, i * to_step, load<Bits>(from, i));
}

void copy_strided(const std::byte* from, std::byte* to, DType dtype, int64_t n,
                  int64_t to_step) noexcept {
  switch (bits_per_element(dtype)) {
    case 8: return spread<uint8_t>(from, to, n, to_step);
    case 16: return spread<uint16_t>(from, to, n, to_step);
    case 32: return spread<uint32_t>(from, to, n, to_step);
    case 64: return spread<uint64_t>(from, to, n, to_step);
    default: assert(!"a stride over elements below a byte");
  }
}

}  // namespace

void cast(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
          int64_t n) noexcept {
  if (from_dtype == to_dtype) {
    if (n > 0) std::memcpy(to, from, bytes_of(from_dtype, n));
    return;
  }
  cast_strided(from, from_dtype, to, to_dtype, n, 1);
}

void cast_strided(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t n,
                  int64_t to_step) noexcept {
  if (from_dtype == to_dtype) return copy_strided(from, to, from_dtype, n, to_step);
  switch (from_dtype) {
    case DType::f32: return convert_from<Fp32>(from, to, to_dtype, n, to_step);
    case DType::bf16: return convert_from<Bf16>(from, to, to_dtype, n, to_step);
    case DType::f16: return convert_from<Fp16>(from, to, to_dtype, n, to_step);
    default: assert(!"cast from a dtype that is never cast");
  }
}

}  // namespace modicum
