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

constexpr bool is_split(StateFormat format) { return format != StateFormat::fp32; }
constexpr bool has_codes(StateFormat format) {
  return format == StateFormat::int8_moments || format == StateFormat::int8_moments_24;
}
constexpr bool has_random(StateFormat format) {
  return format == StateFormat::bf16_moments || has_codes(format);
}

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

// The same for 2 * Lanes(d) elements with two halves of 16 bits.
template <class D>
HWY_INLINE Pair<Floats<D>> load_master_pair(D d, const std::byte* high, const std::byte* low,
                                            int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const auto upper = load_u16_pair(d, high, i);
  const auto lower = load_u16_pair(d, low, i);
  const auto master = [&](Words<D> a, Words<D> b) {
    return joined(d, hn::BitCast(di, a), hn::ShiftRight<16>(hn::BitCast(di, b)));
  };
  return {master(upper.even, lower.even), master(upper.odd, lower.odd)};
}
template <class D>
HWY_INLINE void store_master_pair(D d, const Pair<Floats<D>>& v, std::byte* high, std::byte* low,
                                  int64_t i) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> even = bits_of(d, v.even);
  const Words<D> odd = bits_of(d, v.odd);
  const Words<D> half = hn::Set(du, 0x8000U);
  store_u16_pair(d, {hn::Add(even, half), hn::Add(odd, half)}, high, i);
  store_u16_pair(d, {hn::ShiftLeft<16>(even), hn::ShiftLeft<16>(odd)}, low, i);
}

// ---- moments in bf16: the dropped bits are the probability of rounding up

template <class D>
HWY_INLINE void store_bf16_random(D d, Floats<D> v, Words<D> random16, std::byte* to, int64_t i) {
  store_u16(d, hn::ShiftRight<16>(hn::Add(bits_of(d, v), random16)), to, i);
}

// ---- moments in 8 bits, with the scale of their block

// exp_avg: y = 2x / (1 + |x|) of x = value / scale; the code is 127 y.
template <class D>
HWY_INLINE Floats<D> load_signed_codes(D d, float scale, const std::byte* codes, int64_t i) {
  const hn::Rebind<int8_t, D> d8;
  const hn::Rebind<int32_t, D> di;
  const Floats<D> q = hn::ConvertTo(d, hn::PromoteTo(di, load(d8, codes, i)));
  const Floats<D> x = hn::Div(q, hn::Sub(hn::Set(d, 254.0F), hn::Abs(q)));
  return hn::Mul(x, hn::Set(d, scale));
}

// The divisor: a scale of 0 has only zero elements.
HWY_INLINE float divisor_of(float scale) { return scale > 0 ? scale : 1.0F; }

template <class D>
HWY_INLINE void store_signed_codes(D d, Floats<D> v, float scale, Words<D> random, std::byte* to) {
  const hn::Rebind<int8_t, D> d8;
  const hn::Rebind<int32_t, D> di;
  const Floats<D> y = hn::Div(hn::Add(v, v), hn::Add(hn::Set(d, divisor_of(scale)), hn::Abs(v)));
  const Ints<D> fixed = hn::ConvertTo(di, hn::Mul(y, hn::Set(d, 127 * 0x1p23F)));
  const Ints<D> up = hn::BitCast(di, hn::ShiftRight<9>(random));
  store(d8, hn::DemoteTo(d8, hn::ShiftRight<23>(hn::Add(fixed, up))), to, 0);
}

// exp_avg_sq: the code is 255 root / scale; only 0 has the code 0.
template <class D>
HWY_INLINE Floats<D> load_root_codes(D d, float scale, const std::byte* codes, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::Rebind<int32_t, D> di;
  const Floats<D> q = hn::ConvertTo(d, hn::PromoteTo(di, load(d8, codes, i)));
  return hn::Mul(q, hn::Set(d, scale / 255.0F));
}

template <class D>
HWY_INLINE void store_root_codes(D d, Floats<D> root, float scale, Words<D> random, std::byte* to) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::Rebind<int32_t, D> di;
  const Floats<D> per_root = hn::Set(d, 255 * 0x1p22F / divisor_of(scale));
  const Ints<D> fixed = hn::ConvertTo(di, hn::Mul(root, per_root));
  const Ints<D> up = hn::BitCast(di, hn::ShiftRight<10>(random));
  const Ints<D> rounded = hn::ShiftRight<22>(hn::Add(fixed, up));
  const auto is_positive = hn::RebindMask(di, hn::Gt(root, hn::Zero(d)));
  const Ints<D> least = hn::IfThenElseZero(is_positive, hn::Set(di, 1));
  const Ints<D> code = hn::Max(hn::Min(rounded, hn::Set(di, 255)), least);
  store(d8, hn::DemoteTo(d8, code), to, 0);
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
