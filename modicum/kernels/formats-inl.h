// Conversions between the state formats and fp32 lanes (defined in docs/internals/numerics.md).
// Internal to `kernels`; compiled once per target.
#if defined(MODICUM_KERNELS_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_FORMATS_INL_H_
#undef MODICUM_KERNELS_FORMATS_INL_H_
#else
#define MODICUM_KERNELS_FORMATS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "modicum/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// These depend on the order of StateFormat: fp32, then the split formats, then the others with fp32
// masters; every format but the first two rounds at random.
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
// step, the lower half belongs to another value. The result is the upper half alone if the sum does
// not round to a finite bf16: infinities and NaNs stay such, and +-0 with a negative lower half
// would give a NaN.
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

// The upper half is rounded to nearest, ties away from zero: with ties to even, two values would
// have the same halves. `random` is used only if the lower half has 8 bits.
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

// load_master and store_master for 2 * Lanes(d) elements of a split master.
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
    const Ints<D> both = load(di, low + 2 * i, 0);
    lower.even = hn::ShiftRight<16>(hn::ShiftLeft<16>(both));
    lower.odd = hn::ShiftRight<16>(both);
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
// The codes are spaced as in mu-law coding: 8 segments of equally many codes, each with twice the
// step of the segment before. A value is stored as x = |value| / scale. Its offset
// z = 2 + x (top - 2) is a float whose leading bits are the code: 3 bits of the exponent, 4
// (exp_avg) or 5 (root) of the significand.
//
//   z            2      2.125  ...  3.875  4     4.25  ...  7.75  8 ...  480    496
//   exp_avg      0      1           15     16    17         31    32     126    127
//   step               1/8                      1/4               1/2        16
//
// `kPlaces`: the number of low bits of z that a code drops.
constexpr int kSignedPlaces = 19;               // exp_avg; the code's highest bit is the sign
constexpr int kRootPlaces = 18;                 // root of exp_avg_sq
constexpr uint32_t kLeastOffset = 0x40000000U;  // 2, with zeros where a code has its bits
constexpr uint32_t kExponent = 0x7f800000U;
// The offset of the largest code, 496 or 504.
template <int kPlaces>
constexpr float kTop = std::bit_cast<float>(kLeastOffset +
                                            ((kPlaces == kSignedPlaces ? 127U : 255U) << kPlaces));
// Values are divided by their block's scale, or by this if the scale is smaller, so that no
// quotient overflows. Such a block does not reach the largest code.
constexpr float kLeastDivisor = 0x1p-100F;

// (z - 2) * (1 / (top - 2)) with one rounding.
template <int kPlaces, class D>
HWY_INLINE Floats<D> part_of_scale(D d, Floats<D> z) {
  constexpr float kInverse = 1 / (kTop<kPlaces> - 2);
  return fma(d, z, hn::Set(d, kInverse), hn::Set(d, -2 * kInverse));
}
// The magnitude of a code that has been shifted by kPlaces. The largest code has exactly the scale
// as its magnitude.
template <int kPlaces, class D>
HWY_INLINE Floats<D> value_of(D d, Words<D> placed, float scale) {
  const hn::Rebind<uint32_t, D> du;
  const Floats<D> z = hn::BitCast(d, hn::Or(placed, hn::Set(du, kLeastOffset)));
  return hn::Mul(part_of_scale<kPlaces>(d, z), hn::Set(d, scale));
}

template <class D>
HWY_INLINE Words<D> load_codes(D, const std::byte* codes, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  return hn::PromoteTo(hn::Rebind<uint32_t, D>(), load(d8, codes, i));
}
// The values of codes, which are the lowest bytes of the words.
template <class D>
HWY_INLINE Floats<D> signed_value(D d, Words<D> codes, float scale) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> placed = hn::ShiftLeft<kSignedPlaces>(hn::And(codes, hn::Set(du, 0x7fU)));
  return with_sign(d, value_of<kSignedPlaces>(d, placed, scale), hn::ShiftLeft<24>(codes));
}
template <class D>
HWY_INLINE Floats<D> root_value(D d, Words<D> codes, float scale) {
  return value_of<kRootPlaces>(d, hn::ShiftLeft<kRootPlaces>(codes), scale);
}

// part_of_scale for 2 * Lanes(d) codes. An offset's leading 16 bits hold its code, so 16-bit
// operations make the offsets of both vectors at once.
template <int kPlaces, class D>
HWY_INLINE Pair<Floats<D>> parts_of_scale(D d, hn::Vec<hn::Repartition<uint16_t, D>> codes) {
  const hn::Repartition<uint16_t, D> d16;
  const auto placed = hn::ShiftLeft<kPlaces - 16>(codes);
  const auto z = words_of_halves(d, hn::Add(placed, hn::Set(d16, kLeastOffset >> 16)));
  return {part_of_scale<kPlaces>(d, hn::BitCast(d, z.even)),
          part_of_scale<kPlaces>(d, hn::BitCast(d, z.odd))};
}
template <class D>
HWY_INLINE hn::Vec<hn::Repartition<uint16_t, D>> load_code_pair(D, const std::byte* codes,
                                                                int64_t i) {
  const hn::Repartition<uint16_t, D> d16;
  return hn::PromoteTo(d16, load(hn::Rebind<uint8_t, decltype(d16)>(), codes, i));
}
template <class D>
HWY_INLINE Pair<Floats<D>> signed_pair(D d, const std::byte* codes, int64_t i, float scale) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Repartition<uint16_t, D> d16;
  const auto bytes = load_code_pair(d, codes, i);
  const auto x = parts_of_scale<kSignedPlaces>(d, hn::And(bytes, hn::Set(d16, 0x7f)));
  const Words<D> words = hn::BitCast(du, bytes);
  const Floats<D> s = hn::Set(d, scale);
  return {with_sign(d, hn::Mul(x.even, s), hn::ShiftLeft<24>(words)),
          with_sign(d, hn::Mul(x.odd, s), hn::ShiftLeft<8>(words))};
}
template <class D>
HWY_INLINE Pair<Floats<D>> root_pair(D d, const std::byte* codes, int64_t i, float scale) {
  const auto x = parts_of_scale<kRootPlaces>(d, load_code_pair(d, codes, i));
  const Floats<D> s = hn::Set(d, scale);
  return {hn::Mul(x.even, s), hn::Mul(x.odd, s)};
}

// The summands that round an offset: half of a code's step rounds to nearest; random bits, as many
// as the code drops, round stochastically.
template <int kPlaces>
constexpr uint32_t kNearest = 1U << (kPlaces - 1);
template <class D>
HWY_INLINE Words<D> signed_random(D, Words<D> random) {
  return hn::ShiftRight<32 - kSignedPlaces>(random);
}
template <class D>
HWY_INLINE Words<D> root_random(D, Words<D> random) {
  const hn::Rebind<uint32_t, D> du;
  return hn::And(random, hn::Set(du, (1U << kRootPlaces) - 1));
}

// The factor that turns a block's values into offsets, rounded up so that the value equal to the
// scale gets the largest code.
template <int kPlaces, class D>
HWY_INLINE Floats<D> per_value(D d, Floats<D> scale) {
  const Floats<D> divisor = hn::Max(scale, hn::Set(d, kLeastDivisor));
  return hn::Mul(hn::Div(hn::Set(d, kTop<kPlaces> - 2), divisor), hn::Set(d, 1 + 0x1p-22F));
}
template <class D>
HWY_INLINE Floats<D> offset_of(D d, Floats<D> magnitude, float per) {
  return fma(d, magnitude, hn::Set(d, per), hn::Set(d, 2.0F));
}
// Rounds an offset; its code is then in the bits from kPlaces on. Within a segment steps are equal,
// and a carry into the exponent gives the first code of the next segment, so the value is exact on
// average.
template <int kPlaces, class D>
HWY_INLINE Words<D> rounded(D d, Floats<D> z, Words<D> random) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> top = hn::Set(du, std::bit_cast<uint32_t>(kTop<kPlaces>));
  return hn::Add(hn::Min(bits_of(d, z), top), random);
}

// Words whose highest byte is the code of the rounded offset z. `value` gives the sign.
template <class D>
HWY_INLINE Words<D> signed_code(D d, Words<D> z, Floats<D> value) {
  const Words<D> code = hn::ShiftLeft<24 - kSignedPlaces>(z);
  return bits_of(d, with_sign(d, hn::BitCast(d, code), bits_of(d, value)));
}
// Only 0 has the code 0.
template <class D>
HWY_INLINE Words<D> zero_for_zero(D d, Words<D> z, Floats<D> root) {
  const hn::Rebind<uint32_t, D> du;
  return hn::IfThenElseZero(hn::RebindMask(du, hn::Gt(root, hn::Zero(d))), z);
}
// The largest rounded offset. A root beyond the scale, by its rounding or by `least_of`, has the
// largest code, however it is rounded; so the cap may follow the rounding.
constexpr uint32_t kMaxRounded =
    std::bit_cast<uint32_t>(kTop<kRootPlaces>) + (1U << kRootPlaces) - 1;
template <class D>
HWY_INLINE Words<D> root_code(D, Words<D> z) {
  const hn::Rebind<uint32_t, D> du;
  return hn::ShiftLeft<24 - kRootPlaces>(hn::Min(z, hn::Set(du, kMaxRounded)));
}
template <class D>
HWY_INLINE void store_codes(D, Words<D> words, std::byte* to, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  store(d8, hn::TruncateTo(d8, hn::ShiftRight<24>(words)), to, i);
}
// The upper halves of words in the order of their elements.
template <class D>
HWY_INLINE hn::Vec<hn::Repartition<uint16_t, D>> halves_of(D, const Pair<Words<D>>& words) {
  const hn::Repartition<uint16_t, D> d16;
  const auto even = hn::BitCast(d16, hn::ShiftRight<16>(words.even));
  return hn::OddEven(hn::BitCast(d16, words.odd), even);
}
// The codes that root_code computes, for a pair of vectors; each is the lower byte of 16 bits.
template <class D>
HWY_INLINE hn::Vec<hn::Repartition<uint16_t, D>> root_codes(D d, const Pair<Words<D>>& z) {
  const hn::Repartition<uint16_t, D> d16;
  const auto most = hn::Set(d16, kMaxRounded >> 16);
  return hn::ShiftRight<kRootPlaces - 16>(hn::Min(halves_of(d, z), most));
}
template <class D>
HWY_INLINE void store_lower_bytes(D, hn::Vec<hn::Repartition<uint16_t, D>> halves, std::byte* to,
                                  int64_t i) {
  const hn::Repartition<uint16_t, D> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  store(d8, hn::TruncateTo(d8, halves), to, i);
}
#if HWY_TARGET != HWY_SCALAR
// Stores the upper bytes of `upper` as exp_avg and the lower ones of `lower` as exp_avg_sq.
template <class D>
HWY_INLINE void store_codes_of_both(D, hn::Vec<hn::Repartition<uint16_t, D>> upper,
                                    hn::Vec<hn::Repartition<uint16_t, D>> lower,
                                    const AdamSpan& span, int64_t i) {
  const hn::Repartition<uint16_t, D> d16;
  const hn::Repartition<uint8_t, D> d8;
  const hn::Repartition<uint64_t, D> d64;
  const hn::Half<decltype(d8)> half;
  // Moves the lower bytes to the lower half of each 128 bits, then to the lower half of the vector.
  alignas(16) static constexpr uint8_t kBytes[16] = {0, 2, 4, 6, 8, 10, 12, 14,
                                                     1, 3, 5, 7, 9, 11, 13, 15};
  constexpr auto kWords = [] {
    std::array<uint64_t, hn::MaxLanes(hn::Repartition<uint64_t, D>())> words{};
    for (size_t w = 0; w < words.size(); ++w)
      words[w] = w * 2 % words.size() + w * 2 / words.size();
    return words;
  }();
  const auto both = hn::BitCast(d8, hn::IfVecThenElse(hn::Set(d16, 0xff00U), upper, lower));
  const auto parted = hn::TableLookupBytes(both, hn::LoadDup128(d8, kBytes));
  const auto words =
      hn::TableLookupLanes(hn::BitCast(d64, parted), hn::SetTableIndices(d64, kWords.data()));
  store(half, hn::LowerHalf(half, hn::BitCast(d8, words)), span.exp_avg_sq, i);
  store(half, hn::UpperHalf(half, hn::BitCast(d8, words)), span.exp_avg, i);
}
#endif

// Where the step between exp_avg's codes is large compared with the root, rounding exp_avg would
// cause large updates. So a root is stored as at least 3/4 of that step, plus the value of code 1.
constexpr float kLeastRoot = 2 + 0x1p-4F;  // the offset of code 1
template <class D>
HWY_INLINE Floats<D> least_per_step(D d, Floats<D> exp_avg_scale, Floats<D> root_scale) {
  constexpr float kSteps = 0.75F / 16 * (kTop<kRootPlaces> - 2) / (kTop<kSignedPlaces> - 2);
  const Floats<D> divisor = hn::Max(root_scale, hn::Set(d, kLeastDivisor));
  return hn::Div(hn::Mul(hn::Set(d, kSteps), exp_avg_scale), divisor);
}
// The least offset of a root, given the rounded offset of exp_avg.
template <class D>
HWY_INLINE Floats<D> least_of(D d, Words<D> exp_avg, float per_step) {
  const hn::Rebind<uint32_t, D> du;
  const Floats<D> segment = hn::BitCast(d, hn::And(exp_avg, hn::Set(du, kExponent)));
  return fma(d, segment, hn::Set(d, per_step), hn::Set(d, kLeastRoot));
}

// Largest magnitude of n > 0 floats, NaN if one of them is NaN. Compares their bits as integers,
// which have the same order, with NaN above infinity; a maximum of floats may lose a NaN.
HWY_INLINE float largest(const float* values, int64_t n) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int32_t kMagnitude = 0x7fffffff;
  int32_t most = 0;
  int64_t i = 0;
  const auto at = [&](int64_t k) {
    return hn::And(hn::BitCast(d, hn::LoadU(df, values + k)), hn::Set(d, kMagnitude));
  };
  if (n >= 4 * lanes) {
    auto first = hn::Zero(d);
    auto second = hn::Zero(d);
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      first = hn::Max(first, hn::Max(at(i), at(i + lanes)));
      second = hn::Max(second, hn::Max(at(i + 2 * lanes), at(i + 3 * lanes)));
    }
    most = hn::GetLane(hn::MaxOfLanes(d, hn::Max(first, second)));
  }
  for (; i < n; ++i) most = std::max(most, std::bit_cast<int32_t>(values[i]) & kMagnitude);
  return std::bit_cast<float>(most);
}

#if HWY_TARGET != HWY_SCALAR
// The largest values of four complete blocks without negative values, compared as in `largest`.
HWY_INLINE void largest_of_four(const float* values, float* most) {
  const hn::ScalableTag<uint32_t> d;
  const hn::FixedTag<uint32_t, 4> d4;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  alignas(64) uint32_t by_lane[hn::MaxLanes(d)];
  const auto of_block = [&](int64_t b) {
    const auto at = [&](int64_t k) {
      return hn::BitCast(d, hn::LoadU(hn::ScalableTag<float>(), values + b * kScaleBlock + k));
    };
    auto first = at(0);
    auto second = at(lanes);
    for (int64_t k = 2 * lanes; k < kScaleBlock; k += 2 * lanes) {
      first = hn::Max(first, at(k));
      second = hn::Max(second, at(k + lanes));
    }
    hn::Store(hn::Max(first, second), d, by_lane);
    auto four = hn::Load(d4, by_lane);
    for (int64_t k = 4; k < lanes; k += 4) four = hn::Max(four, hn::Load(d4, by_lane + k));
    return four;
  };
  // Each block has four candidates. Transposing them while taking maxima leaves one per block.
  const auto merged = [&](auto a, auto b) {
    return hn::Max(hn::InterleaveLower(d4, a, b), hn::InterleaveUpper(d4, a, b));
  };
  const auto ab = merged(of_block(0), of_block(1));
  const auto cd = merged(of_block(2), of_block(3));
  const auto all = hn::Max(hn::ConcatLowerLower(d4, cd, ab), hn::ConcatUpperUpper(d4, cd, ab));
  hn::StoreU(hn::BitCast(hn::FixedTag<float, 4>(), all), hn::FixedTag<float, 4>(), most);
}
#endif

// The largest |exp_avg| and root that a code represents. It is below the square root of the largest
// float, so that neither encoding nor squaring overflows.
constexpr float kMaxCoded = 0x1p63F;

// Clamps values to [-kMaxCoded, kMaxCoded] and replaces NaN with 0, so that the other elements of
// their block keep their values.
HWY_INLINE void clamp_to_codes(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const bool is_nan = std::isnan(values[i]);
    values[i] = is_nan ? 0.0F : std::min(std::max(values[i], -kMaxCoded), kMaxCoded);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_FORMATS_INL_H_
