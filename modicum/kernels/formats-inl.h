// Conversions between the state formats and fp32 lanes (defined in docs/internals/numerics.md).
// Internal to `kernels`; compiled once per target.
#if defined(MODICUM_KERNELS_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_FORMATS_INL_H_
#undef MODICUM_KERNELS_FORMATS_INL_H_
#else
#define MODICUM_KERNELS_FORMATS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>

#include "modicum/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

constexpr bool is_split(StateFormat format) {
  return format != StateFormat::fp32 && format < StateFormat::bf16_moments_fp32;
}
constexpr bool has_codes(StateFormat format) {
  return format == StateFormat::int8_moments || format == StateFormat::int8_moments_24 ||
         format == StateFormat::int8_moments_fp32;
}
constexpr bool has_random(StateFormat format) { return format >= StateFormat::bf16_moments; }

// ---- the master parameter

// Joins the two halves to an fp32. If the caller has overwritten the upper half since the last
// step, the lower half belongs to another value; a sum beyond the range of bf16 (a NaN below an
// upper half of +-0) shows that, and the result is the upper half alone.
template <class D>
HWY_INLINE Floats<D> joined(D d, Ints<D> upper, Ints<D> lower) {
  const hn::Rebind<int32_t, D> di;
  const Ints<D> sum = hn::Add(upper, lower);
  const Ints<D> magnitude = hn::And(sum, hn::Set(di, 0x7fffffff));
  const auto is_beyond = hn::Gt(magnitude, hn::Set(di, 0x7f7f7fff));
  return hn::BitCast(d, hn::IfThenElse(is_beyond, upper, sum));
}

template <StateFormat kFormat, class D>
HWY_INLINE Floats<D> load_master(D d, const std::byte* high, const std::byte* low, int64_t i) {
  if constexpr (!is_split(kFormat)) {
    return load(d, high, i);
  } else {
    const hn::Rebind<int32_t, D> di;
    const Ints<D> upper = hn::BitCast(di, hn::ShiftLeft<16>(load_u16(d, high, i)));
    if constexpr (kFormat == StateFormat::int8_moments_24) {
      const hn::Rebind<int8_t, D> d8;
      const Ints<D> lower = hn::PromoteTo(di, load(d8, low, i));
      return joined(d, upper, hn::ShiftLeft<8>(lower));
    } else {
      const hn::Rebind<int16_t, D> d16;
      return joined(d, upper, hn::PromoteTo(di, load(d16, low, i)));
    }
  }
}

// The upper half is rounded half up in magnitude: with ties to even two values would share their
// halves. `random` is used only if the lower half has 8 bits.
template <StateFormat kFormat, class D>
HWY_INLINE void store_master(D d, Floats<D> v, [[maybe_unused]] Words<D> random,
                             const AdamSpan& span, int64_t i) {
  if constexpr (!is_split(kFormat)) {
    store(d, v, span.master, i);
  } else {
    const hn::Rebind<uint32_t, D> du;
    const hn::Rebind<int32_t, D> di;
    constexpr bool kShort = kFormat == StateFormat::int8_moments_24;
    Words<D> bits = bits_of(d, v);
    if constexpr (kShort) {
      const Words<D> up = hn::And(random, hn::Set(du, 0xffU));
      bits = hn::And(hn::Add(bits, up), hn::Set(du, 0xffffff00U));
    }
    const Ints<D> rest = hn::ShiftRight<16>(hn::BitCast(di, hn::ShiftLeft<16>(bits)));
    store_u16(d, hn::ShiftRight<16>(hn::Add(bits, hn::Set(du, 0x8000U))), span.master, i);
    if constexpr (kShort) {
      const hn::Rebind<int8_t, D> d8;
      store(d8, hn::DemoteTo(d8, hn::ShiftRight<8>(rest)), span.master_low, i);
    } else {
      const hn::Rebind<int16_t, D> d16;
      store(d16, hn::DemoteTo(d16, rest), span.master_low, i);
    }
  }
}

// The same for 2 * Lanes(d) elements of a split master.
template <StateFormat kFormat, class D>
HWY_INLINE Pair<Floats<D>> load_master_pair(D d, const std::byte* high, const std::byte* low,
                                            int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const auto upper = load_u16_pair(d, high, i);
  Pair<Ints<D>> lower;
  if constexpr (kFormat == StateFormat::int8_moments_24) {
    const Ints<D> both = hn::BitCast(di, load_u16(d, low + i, 0));
    lower.even = hn::ShiftRight<16>(hn::ShiftLeft<24>(both));
    lower.odd = hn::ShiftRight<16>(hn::ShiftLeft<16>(hn::And(both, hn::Set(di, 0xff00))));
  } else {
    const auto words = load_u16_pair(d, low, i);
    lower.even = hn::ShiftRight<16>(hn::BitCast(di, words.even));
    lower.odd = hn::ShiftRight<16>(hn::BitCast(di, words.odd));
  }
  return {joined(d, hn::BitCast(di, upper.even), lower.even),
          joined(d, hn::BitCast(di, upper.odd), lower.odd)};
}
template <StateFormat kFormat, class D>
HWY_INLINE void store_master_pair(D d, const Pair<Floats<D>>& v, const Pair<Words<D>>& random,
                                  const AdamSpan& span, int64_t i) {
  const hn::Rebind<uint32_t, D> du;
  Words<D> even = bits_of(d, v.even);
  Words<D> odd = bits_of(d, v.odd);
  const Words<D> half = hn::Set(du, 0x8000U);
  if constexpr (kFormat == StateFormat::int8_moments_24) {
    const Words<D> last = hn::Set(du, 0xffU);
    even = hn::Add(even, hn::And(random.even, last));
    odd = hn::Add(odd, hn::And(random.odd, last));
    const Words<D> lower = hn::And(hn::ShiftRight<8>(even), last);
    const hn::Rebind<uint16_t, D> d16;
    const Words<D> both = hn::Or(lower, hn::And(odd, hn::Set(du, 0xff00U)));
    store(d16, hn::TruncateTo(d16, both), span.master_low + i, 0);
    // The dropped bits must not round the upper half up.
    even = hn::AndNot(last, even);
    odd = hn::AndNot(last, odd);
  } else {
    store_u16_halves(d, even, hn::ShiftLeft<16>(odd), span.master_low, i);
  }
  store_u16_pair(d, {hn::Add(even, half), hn::Add(odd, half)}, span.master, i);
}

// ---- moments in bf16: the dropped bits are the probability of rounding up

template <class D>
HWY_INLINE void store_bf16_random(D d, Floats<D> v, Words<D> random16, std::byte* to, int64_t i) {
  store_u16(d, hn::ShiftRight<16>(hn::Add(bits_of(d, v), random16)), to, i);
}

// ---- moments in 8 bits, with the scale of their block
//
// The code c means scale * (c / most)^2, so that steps shrink with the value. In units of
// scale / most^2 a value is t, and the codes' values are the squares:
//
//   codes' values   0   1       4           9               16 ...
//                           t = 5.2: c = 2, and 3 with probability (5.2 - 4) / (9 - 4)

constexpr float kMostSigned = 127;  // codes of exp_avg
constexpr float kMostRoot = 255;    // codes of the root of exp_avg_sq
// Scales below it are divided by it: the codes of such a block are smaller, and no quotient
// overflows.
constexpr float kLeastDivisor = 0x1p-100F;
constexpr float kNearest = 1.5F;  // in place of a random 1 + u: rounds to the nearest value

template <class D>
HWY_INLINE Floats<D> signed_value(D d, Floats<D> code, float scale) {
  const Floats<D> squared = hn::Mul(code, hn::Abs(code));
  const Floats<D> x = hn::Mul(squared, hn::Set(d, 1 / (kMostSigned * kMostSigned)));
  return hn::Mul(x, hn::Set(d, scale));
}
template <class D>
HWY_INLINE Floats<D> root_value(D d, Floats<D> code, float scale) {
  const Floats<D> x = hn::Mul(hn::Mul(code, code), hn::Set(d, 1 / (kMostRoot * kMostRoot)));
  return hn::Mul(x, hn::Set(d, scale));
}

template <class D>
HWY_INLINE Floats<D> load_signed_codes(D d, const std::byte* codes, int64_t i) {
  const hn::Rebind<int8_t, D> d8;
  return hn::ConvertTo(d, hn::PromoteTo(hn::Rebind<int32_t, D>(), load(d8, codes, i)));
}
template <class D>
HWY_INLINE Floats<D> load_root_codes(D d, const std::byte* codes, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  return hn::ConvertTo(d, hn::PromoteTo(hn::Rebind<int32_t, D>(), load(d8, codes, i)));
}
// Codes of 2 * Lanes(d) elements.
template <class D>
HWY_INLINE Pair<Floats<D>> load_signed_code_pair(D d, const std::byte* codes, int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<int16_t, D> d16;
  const Ints<D> both = hn::PromoteTo(di, load(d16, codes + i, 0));
  return {hn::ConvertTo(d, hn::ShiftRight<24>(hn::ShiftLeft<24>(both))),
          hn::ConvertTo(d, hn::ShiftRight<8>(both))};
}
template <class D>
HWY_INLINE Pair<Floats<D>> load_root_code_pair(D d, const std::byte* codes, int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const Ints<D> both = hn::BitCast(di, load_u16(d, codes + i, 0));
  return {hn::ConvertTo(d, hn::And(both, hn::Set(di, 0xff))),
          hn::ConvertTo(d, hn::ShiftRight<8>(both))};
}
// The code, an integer from -128 to 255, as the lowest byte of a word: at this offset the last
// place of a float is 1. A conversion to integers would first have to check their range.
template <class D>
HWY_INLINE Words<D> code_word(D d, Floats<D> code) {
  return bits_of(d, hn::Add(code, hn::Set(d, 0x1.8p23F)));
}
template <class D>
HWY_INLINE void store_code_pair(D d, const Pair<Floats<D>>& codes, std::byte* to, int64_t i) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<uint16_t, D> d16;
  const Words<D> even = hn::And(code_word(d, codes.even), hn::Set(du, 0xffU));
  const Words<D> both = hn::Or(even, hn::ShiftLeft<8>(code_word(d, codes.odd)));
  store(d16, hn::TruncateTo(d16, both), to + i, 0);
}

// 1 + u with u = (r + 1/2) / 2^16 of the lower 16 bits r of a random word: r is placed in the
// significand of 1, the half below it.
constexpr uint32_t kOneAndHalf = 0x3f800040U;
template <class D>
HWY_INLINE Floats<D> lower_fraction(D d, Words<D> random) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> placed = hn::And(hn::ShiftLeft<7>(random), hn::Set(du, 0x7fff80U));
  return hn::BitCast(d, hn::Or(placed, hn::Set(du, kOneAndHalf)));
}
// The same of the upper 16 bits.
template <class D>
HWY_INLINE Floats<D> upper_fraction(D d, Words<D> random) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> placed = hn::And(hn::ShiftRight<9>(random), hn::Set(du, 0x7fff80U));
  return hn::BitCast(d, hn::Or(placed, hn::Set(du, kOneAndHalf)));
}

// u * width of 1 + u, rounded once.
template <class D>
HWY_INLINE Floats<D> share_of([[maybe_unused]] D d, Floats<D> fraction, Floats<D> width) {
#if HWY_NATIVE_FMA
  return hn::MulSub(fraction, width, width);
#else
  return hn::Mul(hn::Sub(fraction, hn::Set(d, 1.0F)), width);
#endif
}

// The code of t >= 0: c or c + 1 of c^2 <= t < (c + 1)^2. Widths and differences of squares are
// exact, with or without a fused multiplication. `fraction`: 1 + u.
template <class D>
HWY_INLINE Floats<D> code_of(D d, Floats<D> t, Floats<D> fraction) {
  const Floats<D> one = hn::Set(d, 1.0F);
  const Floats<D> c = hn::Floor(hn::Sqrt(t));
  const Floats<D> width = hn::MulAdd(c, hn::Set(d, 2.0F), one);
  const Floats<D> rest = hn::NegMulAdd(c, c, t);
  const auto is_up = hn::Lt(share_of(d, fraction, width), rest);
  return hn::Add(c, hn::IfThenElseZero(is_up, one));  // a blend is slower on AVX2
}

// The factor of a block: a value times it is t.
HWY_INLINE float per_unit(float scale, float most_code) {
  return most_code * most_code / std::max(scale, kLeastDivisor);
}

// The magnitude of the code. The scale's own, whose t is 127^2 but for one place, is 127: no
// fraction is that close to 0 or 1.
template <class D>
HWY_INLINE Floats<D> magnitude_code(D d, Floats<D> v, float per, Floats<D> fraction) {
  return code_of(d, hn::Mul(hn::Abs(v), hn::Set(d, per)), fraction);
}

// Where a step of exp_avg's code is large compared with the root, its rounding alone would make
// large updates. So a root is stored as no less than 3/4 of that step, and as no less than code 1.
HWY_INLINE float least_per_step(float exp_avg_scale, float root_scale) {
  constexpr float kSteps = 0.75F * (kMostRoot * kMostRoot) / (kMostSigned * kMostSigned);
  return std::max(kSteps * exp_avg_scale / std::max(root_scale, kLeastDivisor), 1.0F);
}
// For the magnitude of exp_avg's code.
template <class D>
HWY_INLINE Floats<D> least_of(D d, Floats<D> code, float per_step) {
  return fma(d, code, hn::Set(d, 2 * per_step), hn::Set(d, per_step));
}
// The factor is rounded up, so that the scale's own root gets the largest code.
HWY_INLINE float per_root(float scale) { return per_unit(scale, kMostRoot) * (1 + 0x1p-22F); }
// `per`: per_root. `least`: of t. Only 0 has the code 0.
template <class D>
HWY_INLINE Floats<D> root_code(D d, Floats<D> root, float per, Floats<D> least,
                               Floats<D> fraction) {
  Floats<D> t = hn::Max(hn::Mul(root, hn::Set(d, per)), least);
  t = hn::Min(t, hn::Set(d, kMostRoot * kMostRoot));
  const auto is_positive = hn::Gt(root, hn::Zero(d));
  return hn::IfThenElseZero(is_positive, code_of(d, t, fraction));
}

template <class D>
HWY_INLINE void store_codes(D d, Floats<D> codes, std::byte* to, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  store(d8, hn::TruncateTo(d8, code_word(d, codes)), to, i);
}

// Largest magnitude of n > 0 floats, NaN if one of them is NaN. Compares as integers, which have
// the same order with NaN above infinity; a maximum of floats may lose a NaN.
HWY_INLINE float largest(const float* values, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int32_t kMagnitude = 0x7fffffff;
  int32_t most = 0;
  int64_t i = 0;
  if (n >= lanes) {
    auto all = hn::Zero(d);
    for (; i + lanes <= n; i += lanes) {
      all =
          hn::Max(all, hn::And(hn::BitCast(d, hn::LoadU(df, values + i)), hn::Set(d, kMagnitude)));
    }
    most = hn::GetLane(hn::MaxOfLanes(d, all));
  }
  for (; i < n; ++i) most = std::max(most, std::bit_cast<int32_t>(values[i]) & kMagnitude);
  return std::bit_cast<float>(most);
}

// The largest |exp_avg| and root that a code represents: below the root of the largest float, so
// that neither encoding nor squaring overflows.
constexpr float kMostCoded = 0x1p63F;

// The scale of n > 0 values of one block. Values beyond the largest code are first clamped to it,
// and NaN becomes 0, so that the other elements of the block keep their values.
HWY_INLINE float scale_of(float* values, int64_t n) {
  const float scale = largest(values, n);
  if (scale <= kMostCoded) return scale;
  for (int64_t i = 0; i < n; ++i) {
    const bool is_nan = std::isnan(values[i]);
    values[i] = is_nan ? 0.0F : std::min(std::max(values[i], -kMostCoded), kMostCoded);
  }
  return largest(values, n);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_FORMATS_INL_H_
