// Loads, stores and conversions of Highway vectors, bit-equal on every instruction set. Internal to
// `kernels`; compiled once per target.
#if defined(MODICUM_KERNELS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_LANES_INL_H_
#undef MODICUM_KERNELS_LANES_INL_H_
#else
#define MODICUM_KERNELS_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "modicum/kernels/random_bits.h"
#include "modicum/spec/spec.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// `D` is a tag of float vectors, except in `load` and `store`. Words and Ints have as many lanes as
// Floats.
template <class D>
using Floats = hn::Vec<D>;
template <class D>
using Words = hn::Vec<hn::Rebind<uint32_t, D>>;
template <class D>
using Ints = hn::Vec<hn::Rebind<int32_t, D>>;

using OneLane = hn::CappedTag<float, 1>;

// The vector of elements from i on; the array needs no alignment.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const std::byte* from, int64_t i) {
  using T = hn::TFromD<D>;
  const std::byte* at = from + i * static_cast<int64_t>(sizeof(T));
  if constexpr (hn::MaxLanes(D()) == 1) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return hn::Set(d, value);
  } else {
    return hn::LoadU(d, reinterpret_cast<const T*>(at));
  }
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, std::byte* to, int64_t i) {
  using T = hn::TFromD<D>;
  std::byte* at = to + i * static_cast<int64_t>(sizeof(T));
  if constexpr (hn::MaxLanes(D()) == 1) {
    const T value = hn::GetLane(v);
    std::memcpy(at, &value, sizeof value);
  } else {
    hn::StoreU(v, d, reinterpret_cast<T*>(at));
  }
}

template <class D>
HWY_INLINE Words<D> bits_of(D, Floats<D> v) {
  return hn::BitCast(hn::Rebind<uint32_t, D>(), v);
}
// `magnitude`, whose highest bit is 0, with the highest bit of `sign`.
template <class D>
HWY_INLINE Floats<D> with_sign(D d, Floats<D> magnitude, Words<D> sign) {
  return hn::CopySignToAbs(magnitude, hn::BitCast(d, sign));
}
template <class D>
HWY_INLINE Words<D> load_u16(D, const std::byte* from, int64_t i) {
  const hn::Rebind<uint16_t, D> d16;
  return hn::PromoteTo(hn::Rebind<uint32_t, D>(), load(d16, from, i));
}
// The words are below 2^16.
template <class D>
HWY_INLINE void store_u16(D, Words<D> v, std::byte* to, int64_t i) {
  const hn::Rebind<uint16_t, D> d16;
  store(d16, hn::DemoteTo(d16, hn::BitCast(hn::Rebind<int32_t, D>(), v)), to, i);
}

// 2 * Lanes(d) elements as two vectors: even indices and odd indices. Not for OneLane.
template <class V>
struct Pair {
  V even, odd;
};

// 16-bit elements, each as the upper half of a 32-bit word, without moving lanes.
template <class D, class V16>
HWY_INLINE Pair<Words<D>> words_of_halves(D, V16 halves) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> both = hn::BitCast(du, halves);
  return {hn::ShiftLeft<16>(both), hn::And(both, hn::Set(du, 0xffff0000U))};
}
template <class D>
HWY_INLINE Pair<Words<D>> load_u16_pair(D d, const std::byte* from, int64_t i) {
  return words_of_halves(d, load(hn::Rebind<uint32_t, D>(), from + 2 * i, 0));
}
// Stores the lower halves of `even` and the upper halves of `odd`.
template <class D>
HWY_INLINE void store_u16_halves(D, Words<D> even, Words<D> odd, std::byte* to, int64_t i) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Repartition<uint16_t, D> d16;
  const auto both = hn::OddEven(hn::BitCast(d16, odd), hn::BitCast(d16, even));
  store(du, hn::BitCast(du, both), to + 2 * i, 0);
}
// Stores the upper halves.
template <class D>
HWY_INLINE void store_u16_pair(D d, const Pair<Words<D>>& v, std::byte* to, int64_t i) {
  store_u16_halves(d, hn::ShiftRight<16>(v.even), v.odd, to, i);
}

// a * b + c with one rounding. For targets without FMA Highway's MulAdd would round twice, so
// std::fma computes one lane at a time, which is slow.
template <class D>
HWY_INLINE Floats<D> fma(D d, Floats<D> a, Floats<D> b, Floats<D> c) {
#if HWY_NATIVE_FMA
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  alignas(64) float x[hn::MaxLanes(D())];
  alignas(64) float y[hn::MaxLanes(D())];
  alignas(64) float z[hn::MaxLanes(D())];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (size_t i = 0; i < hn::Lanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
#endif
}

// ---- bf16 and fp16, by the methods of floats.h. Unlike the functions there, load_f16 keeps a
// NaN's quiet bit as it is, and narrow_f16 makes every NaN 0x7e00 with its sign.

template <class D>
HWY_INLINE Floats<D> load_bf16(D d, const std::byte* from, int64_t i) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_u16(d, from, i)));
}

// Like load_bf16, for 2 * Lanes(d) elements.
template <class D>
HWY_INLINE Pair<Floats<D>> load_bf16_pair(D d, const std::byte* from, int64_t i) {
  const auto words = load_u16_pair(d, from, i);
  return {hn::BitCast(d, words.even), hn::BitCast(d, words.odd)};
}

template <class D>
HWY_INLINE Words<D> narrow_bf16(D d, Floats<D> v) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> bits = bits_of(d, v);
  const Words<D> odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
  const Words<D> rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffU))));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  return hn::IfThenElse(is_nan, hn::Set(du, 0x7fc0U), rounded);
}

template <class D>
HWY_INLINE Floats<D> load_f16(D d, const std::byte* from, int64_t i) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const Words<D> bits = load_u16(d, from, i);
  const Words<D> sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000U)));
  const Ints<D> magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7fffU)));
  const Ints<D> exponent = hn::ShiftRight<10>(magnitude);
  const Ints<D> implicit = hn::ShiftLeft<10>(hn::Min(exponent, hn::Set(di, 1)));
  const Ints<D> significand = hn::Or(hn::And(magnitude, hn::Set(di, 0x3ff)), implicit);
  const Ints<D> scale =
      hn::ShiftLeft<23>(hn::Add(hn::Max(exponent, hn::Set(di, 1)), hn::Set(di, 127 - 25)));
  const Floats<D> product = hn::Mul(hn::ConvertTo(d, significand), hn::BitCast(d, scale));
  const auto special = hn::Gt(magnitude, hn::Set(di, 0x7bff));
  const Ints<D> to_special = hn::IfThenElseZero(special, hn::Set(di, (255 - 143) << 23));
  const Words<D> moved = hn::BitCast(du, hn::Add(hn::BitCast(di, product), to_special));
  return hn::BitCast(d, hn::Or(sign, moved));
}

template <class D>
HWY_INLINE Words<D> narrow_f16(D d, Floats<D> v) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const Words<D> bits = bits_of(d, v);
  const Words<D> sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000U));
  const Ints<D> magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7fffffffU)));
  const Ints<D> capped = hn::Min(magnitude, hn::Set(di, (127 + 16) << 23));
  const Ints<D> exponent = hn::Max(hn::ShiftRight<23>(capped), hn::Set(di, 127 - 14));
  const Ints<D> anchor = hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(di, 13)));
  const Floats<D> sum = hn::Add(hn::BitCast(d, capped), hn::BitCast(d, anchor));
  const Ints<D> places = hn::Sub(hn::BitCast(di, sum), anchor);
  const Ints<D> binade = hn::ShiftLeft<10>(hn::Sub(exponent, hn::Set(di, 127 - 14)));
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
  const Ints<D> number = hn::IfThenElse(is_nan, hn::Set(di, 0x7e00), hn::Add(binade, places));
  return hn::Or(sign, hn::BitCast(du, number));
}

// `dtype` is f32, bf16 or f16, and constant during a call.
template <class D>
HWY_INLINE Floats<D> load_floats(D d, DType dtype, const std::byte* from, int64_t i) {
  if (dtype == DType::f32) return load(d, from, i);
  if (dtype == DType::bf16) return load_bf16(d, from, i);
  return load_f16(d, from, i);
}

// ---- random bits

// Hashes counters to random words; `factor` is the block's second key.
template <class D>
HWY_INLINE Words<D> hashed(D, Words<D> x, uint32_t factor) {
  const hn::Rebind<uint32_t, D> du;
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(du, factor));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}
// Random words of the elements `in_block` + offset of the block to which the keys belong.
template <class D>
HWY_INLINE Words<D> random_words(D d, const uint32_t* keys, int64_t in_block, Words<D> offset) {
  const hn::Rebind<uint32_t, D> du;
  const uint32_t first = keys[0] + static_cast<uint32_t>(in_block) * kCounterFactor;
  const Words<D> counter = hn::Mul(offset, hn::Set(du, kCounterFactor));
  return hashed(d, hn::Add(counter, hn::Set(du, first)), keys[1]);
}
// Random words from element `in_block` on.
template <class D>
HWY_INLINE Words<D> random_words(D d, const uint32_t* keys, int64_t in_block) {
  const hn::Rebind<uint32_t, D> du;
  return random_words(d, keys, in_block, hn::Iota(du, 0));
}
template <class D>
HWY_INLINE Pair<Words<D>> random_word_pair(D d, const uint32_t* keys, int64_t in_block) {
  const hn::Rebind<uint32_t, D> du;
  const Words<D> even = hn::ShiftLeft<1>(hn::Iota(du, 0));
  return {random_words(d, keys, in_block, even),
          random_words(d, keys, in_block, hn::Add(even, hn::Set(du, 1U)))};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_LANES_INL_H_
