// The values of synthesised checkpoints. They define the content of such files and must never
// change; synth_value_test pins them.
#include <cassert>
#include <cstring>

#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

// A counter-based hash: elements can be computed in any order.
MODICUM_INLINE uint64_t hash64(uint64_t tensor_hash, int64_t index) noexcept {
  uint64_t x = tensor_hash + (static_cast<uint64_t>(index) + 1) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// The types below make an element's bits from its hash. An element of fewer than 64 bits is made
// from the hash's upper bits.

// Random sign and mantissa; four bits of the exponent field choose one of the sixteen binades of
// [2^-16, 1).
MODICUM_INLINE uint32_t float_of(uint64_t hash) noexcept {
  const auto random = static_cast<uint32_t>(hash >> 32);
  return (random & 0x807fffffU) | ((111U + ((random >> 23) & 15U)) << 23);
}

struct F32 {
  static MODICUM_INLINE uint32_t bits(uint64_t hash) noexcept { return float_of(hash); }
};

struct Bf16 {
  static MODICUM_INLINE uint16_t bits(uint64_t hash) noexcept {
    return static_cast<uint16_t>(float_of(hash) >> 16);
  }
};

// Maps sixteen random exponents to the fifteen exponent fields of [0, 1): field 0 (denormals)
// occurs twice as often as any other.
struct F16 {
  static MODICUM_INLINE uint16_t bits(uint64_t hash) noexcept {
    const auto random = static_cast<uint32_t>(hash >> 48);
    const uint32_t field = (((random >> 10) & 15U) * 15U) >> 4;
    return static_cast<uint16_t>((random & 0x83ffU) | (field << 10));
  }
};

struct F64 {
  static MODICUM_INLINE uint64_t bits(uint64_t hash) noexcept {
    return (hash & 0x800fffffffffffffU) | ((1007U + ((hash >> 52) & 15U)) << 52);
  }
};

struct C64 {
  static MODICUM_INLINE uint64_t bits(uint64_t hash) noexcept {
    const uint64_t imaginary = float_of(hash << 32);
    return (imaginary << 32) | float_of(hash);
  }
};

struct Boolean {
  static MODICUM_INLINE uint8_t bits(uint64_t hash) noexcept {
    return static_cast<uint8_t>(hash >> 63);
  }
};

template <typename Bits>
struct RawBits {
  static MODICUM_INLINE Bits bits(uint64_t hash) noexcept {
    return static_cast<Bits>(hash >> (64 - 8 * sizeof(Bits)));
  }
};

// A code with (code & kMask) == kValue is not finite; inverting its bits kFlip makes it finite.
template <uint8_t kMask, uint8_t kValue, uint8_t kFlip>
struct Code {
  static MODICUM_INLINE uint8_t bits(uint64_t hash) noexcept {
    const auto code = static_cast<uint8_t>(hash >> 56);
    return static_cast<uint8_t>((code & kMask) == kValue ? code ^ kFlip : code);
  }
};
using E5m2 = Code<0x7c, 0x7c, 0x40>;  // the largest exponent: infinities and NaNs
using E4m3 = Code<0x7f, 0x7f, 0x40>;
using E8m0 = Code<0xff, 0xff, 0x80>;
using Fnuz = Code<0xff, 0x80, 0x80>;  // the code of -0 is the only NaN

template <typename Element>
struct Fill {
  uint64_t tensor_hash;
  int64_t first;
  int64_t n;
  std::byte* to;

  MODICUM_INLINE void operator()() const noexcept {
    const Fill local = *this;
    for (int64_t i = 0; i < local.n; ++i) {
      const auto bits = Element::bits(hash64(local.tensor_hash, local.first + i));
      std::memcpy(local.to + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
    }
  }
};

// Elements below a byte are packed from the lowest bits on.
void fill_f4(uint64_t tensor_hash, int64_t first, int64_t n, std::byte* to) noexcept {
  for (int64_t i = 0; i < n; i += 2) {
    const uint64_t low = hash64(tensor_hash, first + i) >> 60;
    const uint64_t high = hash64(tensor_hash, first + i + 1) >> 60;
    to[i / 2] = static_cast<std::byte>(low | (high << 4));
  }
}

void fill_f6(uint64_t tensor_hash, int64_t first, int64_t n, std::byte* to) noexcept {
  for (int64_t i = 0; i < n; i += 4) {
    uint64_t packed = 0;
    for (int k = 0; k < 4; ++k) packed |= (hash64(tensor_hash, first + i + k) >> 58) << (6 * k);
    for (int k = 0; k < 3; ++k) to[i / 4 * 3 + k] = static_cast<std::byte>(packed >> (8 * k));
  }
}

}  // namespace

void synth_fill(uint64_t tensor_hash, DType dtype, int64_t first, int64_t n,
                std::byte* to) noexcept {
  const uint64_t hash = tensor_hash;
  switch (dtype) {
    case DType::boolean: return run_widest(Fill<Boolean>{hash, first, n, to});
    case DType::f4: return fill_f4(hash, first, n, to);
    case DType::f6_e2m3:
    case DType::f6_e3m2: return fill_f6(hash, first, n, to);
    case DType::f8_e5m2: return run_widest(Fill<E5m2>{hash, first, n, to});
    case DType::f8_e4m3: return run_widest(Fill<E4m3>{hash, first, n, to});
    case DType::f8_e8m0: return run_widest(Fill<E8m0>{hash, first, n, to});
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz: return run_widest(Fill<Fnuz>{hash, first, n, to});
    case DType::u8:
    case DType::i8: return run_widest(Fill<RawBits<uint8_t>>{hash, first, n, to});
    case DType::i16:
    case DType::u16: return run_widest(Fill<RawBits<uint16_t>>{hash, first, n, to});
    case DType::i32:
    case DType::u32: return run_widest(Fill<RawBits<uint32_t>>{hash, first, n, to});
    case DType::i64:
    case DType::u64: return run_widest(Fill<RawBits<uint64_t>>{hash, first, n, to});
    case DType::f16: return run_widest(Fill<F16>{hash, first, n, to});
    case DType::bf16: return run_widest(Fill<Bf16>{hash, first, n, to});
    case DType::f32: return run_widest(Fill<F32>{hash, first, n, to});
    case DType::f64: return run_widest(Fill<F64>{hash, first, n, to});
    case DType::c64: return run_widest(Fill<C64>{hash, first, n, to});
    case DType::count: assert(!"a dtype");
  }
}

}  // namespace modicum
