// Export and import of a span's planes as fp32. Internal to `kernels`; compiled once per target.
#if defined(MODICUM_KERNELS_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_PLANES_INL_H_
#undef MODICUM_KERNELS_PLANES_INL_H_
#else
#define MODICUM_KERNELS_PLANES_INL_H_
#endif

#include "modicum/kernels/codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// The codes and scales of exp_avg_sq or max_exp_avg_sq.
struct SquarePlane {
  std::byte* codes;
  float* scales;
};
HWY_INLINE SquarePlane square_plane(const AdamSpan& span, StatePlane plane) {
  if (plane == StatePlane::exp_avg_sq) return {span.exp_avg_sq, span.exp_avg_sq_scale};
  return {span.max_exp_avg_sq, span.max_exp_avg_sq_scale};
}

template <StateFormat kFormat>
struct Export {
  AdamSpan span;
  StatePlane plane;
  Piece piece;
  std::byte* to;

  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    if (plane == StatePlane::master) {
      store(d, load_master<kFormat>(d, span.master, span.master_low, i), to, i);
    } else if (plane == StatePlane::exp_avg) {
      const float scale = scale_at<kFormat>(span.exp_avg_scale, piece);
      store(d, load_exp_avg<kFormat>(d, span.exp_avg, scale, i), to, i);
    } else {
      const SquarePlane from = square_plane(span, plane);
      const float scale = scale_at<kFormat>(from.scales, piece);
      store(d, load_exp_avg_sq<kFormat>(d, from.codes, scale, i), to, i);
    }
  }
};

template <StateFormat kFormat>
void export_all(const AdamSpan& span, StatePlane plane, float* to) {
  Pieces<kFormat> pieces(span, 0);
  for (Piece piece; pieces.next(piece);) {
    const Export<kFormat> op{span, plane, piece, reinterpret_cast<std::byte*>(to)};
    for_lanes(op, piece.begin, piece.end);
  }
}

// Imports any plane except 8-bit moments.
template <StateFormat kFormat>
struct Import {
  AdamSpan span;
  StatePlane plane;
  Piece piece;
  const std::byte* from;

  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const hn::Rebind<uint32_t, D> du;
    Floats<D> value = load(d, from, i);
    // Rounding the largest NaN patterns up would carry into the sign and give a number.
    const Floats<D> nan = hn::BitCast(d, hn::Set(du, 0x7fc00000U));
    if constexpr (kFormat != StateFormat::fp32)
      value = hn::IfThenElse(hn::IsNaN(value), nan, value);
    Words<D> random = hn::Zero(du);
    if constexpr (has_random(kFormat)) random = random_words(d, piece, i);
    if (plane == StatePlane::master) {
      store_master<kFormat>(d, value, random, span, i);
    } else if (plane == StatePlane::exp_avg) {
      random = hn::And(random, hn::Set(du, 0xffffU));
      store_moment(d, value, random, span.exp_avg, i);
    } else {
      random = hn::ShiftRight<16>(random);
      store_moment(d, value, random, square_plane(span, plane).codes, i);
    }
  }

  template <class D>
  HWY_INLINE void store_moment(D d, Floats<D> value, Words<D> random16, std::byte* to,
                               int64_t i) const {
    if constexpr (has_random(kFormat)) {
      store_bf16_random(d, value, random16, to, i);
    } else {
      store(d, value, to, i);
    }
  }
};

// Copies a piece's values, or their square roots, to `to`.
struct Stage {
  const std::byte* from;
  float* to;
  bool roots;
  Piece piece;
  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> value = load(d, from, i);
    hn::StoreU(roots ? hn::Sqrt(value) : value, d, to + i - piece.begin);
  }
};

// Encodes a staged piece, rounded to nearest.
struct EncodeNearest {
  const float* from;
  std::byte* to;
  bool roots;
  Piece piece;
  float per;  // per_value(scale)
  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const hn::Rebind<uint32_t, D> du;
    const Floats<D> value = hn::LoadU(d, from + i - piece.begin);
    const Floats<D> z = offset_of(d, hn::Abs(value), per);
    if (roots) {
      const Words<D> half = hn::Set(du, kNearest<kRootPlaces>);
      const Words<D> code = hn::Add(bits_of(d, hn::Max(z, hn::Set(d, kLeastRoot))), half);
      store_codes(d, root_code(d, zero_for_zero(d, code, value)), to, i);
    } else {
      const Words<D> half = hn::Set(du, kNearest<kSignedPlaces>);
      store_codes(d, signed_code(d, rounded<kSignedPlaces>(d, z, half), value), to, i);
    }
  }
};

template <StateFormat kFormat>
void import_all(const AdamNumbers& numbers, const AdamSpan& span, StatePlane plane,
                const float* from) {
  const uint64_t stream = stream_key(numbers.seed, numbers.step, span.parameter);
  const auto* bytes = reinterpret_cast<const std::byte*>(from);
  const bool roots = plane != StatePlane::exp_avg;
  const SquarePlane to =
      roots ? square_plane(span, plane) : SquarePlane{span.exp_avg, span.exp_avg_scale};
  alignas(64) float staged[kScaleBlock];
  Pieces<kFormat> pieces(span, stream);
  for (Piece piece; pieces.next(piece);) {
    if (!has_codes(kFormat) || plane == StatePlane::master) {
      for_lanes(Import<kFormat>{span, plane, piece, bytes}, piece.begin, piece.end);
      continue;
    }
    for_lanes(Stage{bytes, staged, roots, piece}, piece.begin, piece.end);
    const int64_t n = piece.end - piece.begin;
    float scale = largest(staged, n);
    if (!(scale <= kMaxCoded)) {
      clamp_to_codes(staged, n);
      scale = largest(staged, n);
    }
    to.scales[piece.scale] = scale;
    const OneLane d;
    const auto lane = hn::Set(d, scale);
    const float per =
        hn::GetLane(roots ? per_value<kRootPlaces>(d, lane) : per_value<kSignedPlaces>(d, lane));
    for_lanes(EncodeNearest{staged, to.codes, roots, piece, per}, piece.begin, piece.end);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_PLANES_INL_H_
