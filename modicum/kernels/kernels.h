// The public header of `kernels`: arithmetic over contiguous elements. The functions have no state
// but the instruction set that use_isa sets, and start no threads. Pointers need no alignment
// (except copy_streaming's); ranges must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "modicum/kernels/adamw.h"  // IWYU pragma: export
#include "modicum/spec/spec.h"

namespace modicum {

// Casts `n` elements between fp32, bf16 and fp16: round to nearest, ties to even; values too large
// become infinities; denormals are kept, whatever the caller's flush-to-zero mode. fp16 <-> bf16
// goes through fp32. Equal dtypes are copied. No other pair of dtypes may be passed: the plan
// refuses such casts.
//
// NaNs stay NaNs. Casts from fp32 and fp16 to bf16 make every NaN 0x7fc0, as torch 2.13's scalar
// code does (its AVX2 code gives 0xffff). fp32 <-> fp16 keeps the sign and the upper payload bits
// and sets the quiet bit; bf16 -> fp32 keeps all bits. Both rules are those of torch's vector code.
void cast(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
          int64_t n) noexcept;

// values[i] *= factor, one fp32 rounding.
void scale(float* values, float factor, int64_t n) noexcept;

// Like `cast`, but writes element i to `to` + i * to_step elements. Dtypes of whole bytes only.
void cast_strided(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t n,
                  int64_t to_step) noexcept;

// Contiguous FP8 codes of one row. The scale of code i is scales[(into_block + i) / block].
struct ScaledCodes {
  const std::byte* codes = nullptr;
  DType dtype = DType::f8_e4m3;  // or f8_e5m2
  const float* scales = nullptr;
  int64_t into_block = 0;  // codes of the first block that precede code 0
  int64_t block = 1;       // codes per block
};

// Multiplies `n` codes by their scales in fp32, rounded to nearest even, and casts the products to
// fp32, bf16 or fp16; element i is written to `to` + i * to_step elements. Denormal scales and
// products are kept, whatever the caller's flush-to-zero mode. Every NaN is the quiet NaN
// 0x7fc00000, 0x7fc0 or 0x7e00.
void dequant(const ScaledCodes& from, std::byte* to, DType to_dtype, int64_t n,
             int64_t to_step = 1) noexcept;

// Converts stored scales of dtype fp32, bf16, fp16, F8_E8M0 or U8 to fp32, exactly. A byte of
// F8_E8M0 or U8 means 2^(byte - 127), except 255: NaN in F8_E8M0 and infinity in U8, as in
// transformers.
void widen_scales(const std::byte* from, DType dtype, int64_t n, float* to) noexcept;

// How many of `n` elements are zero, of either sign, and how many are infinite. `dtype` is fp32,
// bf16, fp16, F8_E4M3 or F8_E5M2; element i is at `from` + i * step elements. A cast keeps zeros,
// infinities and NaNs, so what it adds to these counts are the values that left the dtype's range.
struct Specials {
  int64_t zeros = 0;
  int64_t infinities = 0;
};
Specials count_specials(const std::byte* from, DType dtype, int64_t n, int64_t step = 1) noexcept;
// The value of element i, whose dtype is one of these.
double value_at(const std::byte* from, DType dtype, int64_t i) noexcept;

// Copies `n` bytes by stores that bypass the caches, which is fastest if the target is much larger
// than the caches. `from`, `to` and `n` are multiples of 64.
void copy_streaming(const std::byte* from, std::byte* to, size_t n) noexcept;

// 64 bits of a name: XXH3 of its bytes.
uint64_t name_hash(std::string_view name) noexcept;

// The synthesised value of element `index` of the tensor whose name hashes to `tensor_hash`: a
// counter-based hash, finite in every dtype, independent of the division into calls. Floats of 16
// bits and more have magnitudes in [2^-16, 1), any sign and any mantissa, except that fp16 has
// magnitudes in [0, 1), one in eight denormal or 0; a bf16 value is the upper half of the fp32
// value. F8 is any code but NaN and infinity; BOOL is 0 or 1; other dtypes have any bits. Files
// depend on these values: they never change. Writes elements [first, first + n); for dtypes below a
// byte, `first` and `n` are even (multiples of four for 6 bits).
void synth_fill(uint64_t tensor_hash, DType dtype, int64_t first, int64_t n,
                std::byte* to) noexcept;

// The rules of a recipe's `init`, in the order of InitRule. `normal` draws from N(0, std^2) by a
// hash of (seed, index), independent of the division into calls. dtype: fp32, bf16 or fp16.
enum class InitKind : uint8_t { zeros, ones, normal };
struct InitFill {
  InitKind kind;
  double std;     // used by `normal`
  uint64_t seed;  // used by `normal`
  DType dtype;
};
// Writes elements [first, first + n).
void init_fill(const InitFill& fill, int64_t first, int64_t n, std::byte* to) noexcept;

// The sum over n elements of a hash of (seed, index, bits), modulo 2^64. It is a contiguous run's
// part of a digest. The digest does not depend on the layout, since the parts of any division add
// up to the same sum. Element i has the index first + i; `element_bytes` is 1, 2, 4 or 8.
uint64_t digest_run(uint64_t seed, const std::byte* elements, int element_bytes, int64_t first,
                    int64_t n) noexcept;

// The part that `bytes`, which begin at byte `at` of a tensor, have in the tensor's checksum: a sum
// over the tensor's 32-bit words (little-endian, the last one filled up with zeros), modulo 2^64,
// of each word times a factor that depends on its place and on `seed`. Linear in the bytes, so the
// parts of any division add up, also where a word is divided. Several times as fast as digest_run.
// A change within one word always changes the sum; other changes remain unseen with a probability
// of about 2^-32. Records depend on the factors: they never change.
uint64_t checksum_run(uint64_t seed, uint64_t at, std::span<const std::byte> bytes) noexcept;

}  // namespace modicum
