// One step of AdamW, and the planes of a span to fp32 and back. Internal to `kernels`; compiled
// once per target.
#if defined(MODICUM_KERNELS_ADAMW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_ADAMW_INL_H_
#undef MODICUM_KERNELS_ADAMW_INL_H_
#else
#define MODICUM_KERNELS_ADAMW_INL_H_
#endif

#include "modicum/kernels/adamw.h"
#include "modicum/kernels/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// ---- the arithmetic, rounding by rounding (docs/optimizer.md)

enum class Rule : uint8_t { torch, torch_amsgrad, deepspeed };

// What is the same for all elements of a call.
struct Constants {
  AdamNumbers numbers;
  float unscale;       // negative where the sum is to be maximised: that is exact
  float lerp;          // exp_avg's way to the gradient, counted from the nearer end
  bool from_exp_avg;   // which is exp_avg
  bool adds_decay;     // L2
  bool decays_master;  // decoupled
};

inline Constants constants_of(const AdamNumbers& n) {
  const bool near = std::fabs(n.one_minus_beta1) < 0.5F;
  return {n,
          n.maximize ? -n.unscale : n.unscale,
          near ? n.one_minus_beta1 : n.one_minus_beta1 - 1.0F,
          near,
          !n.decoupled && n.decay != 0,
          n.decoupled && n.decay != 0};
}

template <class D>
HWY_INLINE Floats<D> gradient_with_decay(D d, const Constants& c, Floats<D> g, Floats<D> p) {
  if (!c.adds_decay) return g;
  return fma(d, p, hn::Set(d, c.numbers.decay), g);
}

template <Rule kRule, class D>
HWY_INLINE Floats<D> next_exp_avg(D d, const Constants& c, Floats<D> g, Floats<D> m) {
  if constexpr (kRule == Rule::deepspeed) {
    const Floats<D> kept = hn::Mul(m, hn::Set(d, c.numbers.beta1));
    return fma(d, g, hn::Set(d, c.numbers.one_minus_beta1), kept);
  } else {
    // A blend: of `?:` GCC makes a way through memory.
    const auto from_exp_avg = hn::Eq(hn::Set(d, c.from_exp_avg ? 0.0F : 1.0F), hn::Zero(d));
    return fma(d, hn::Set(d, c.lerp), hn::Sub(g, m), hn::IfThenElse(from_exp_avg, m, g));
  }
}

template <Rule kRule, class D>
HWY_INLINE Floats<D> next_exp_avg_sq(D d, const Constants& c, Floats<D> g, Floats<D> v) {
  const Floats<D> kept = hn::Mul(v, hn::Set(d, c.numbers.beta2));
  const Floats<D> share = hn::Set(d, c.numbers.one_minus_beta2);
  if constexpr (kRule == Rule::deepspeed) {
    return fma(d, hn::Mul(g, g), share, kept);
  } else {
    return fma(d, hn::Mul(share, g), g, kept);
  }
}

template <Rule kRule, class D>
HWY_INLINE Floats<D> next_master(D d, const Constants& c, Floats<D> p, Floats<D> m,
                                 Floats<D> root) {
  const AdamNumbers& n = c.numbers;
  const Floats<D> decay = hn::Set(d, n.decay);
  const Floats<D> step_size = hn::Set(d, n.step_size);
  if constexpr (kRule == Rule::deepspeed) {
    const Floats<D> update = hn::Div(m, fma(d, root, hn::Set(d, n.bias2), hn::Set(d, n.eps)));
    if (c.decays_master) p = fma(d, p, decay, p);
    return fma(d, update, step_size, p);
  } else {
    const Floats<D> denominator = hn::Add(hn::Div(root, hn::Set(d, n.bias2)), hn::Set(d, n.eps));
    if (c.decays_master) p = hn::Mul(p, decay);
    return hn::Add(p, hn::Div(hn::Mul(step_size, m), denominator));
  }
}

// ---- pieces of a span

// Calls op(d, i) for every i of [begin, end): with full vectors, then with single lanes.
template <class Op>
HWY_INLINE void for_lanes(const Op& op, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) op(d, i);
  for (; i < end; ++i) op(OneLane(), i);
}

// Elements of a span: all of them, or those of one block where that has keys and scales.
struct Piece {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t to_block = 0;  // element i is the block's i + to_block
  int64_t scale = 0;     // index of its scales
  BlockKeys keys = {};
};

template <StateFormat kFormat>
HWY_INLINE Piece piece_at(const AdamSpan& span, uint64_t stream, int64_t begin) {
  if constexpr (!has_random(kFormat)) return {0, span.n, 0, 0, {}};
  const int64_t index = span.first + begin;
  const int64_t in_block = index % kScaleBlock;
  return {begin, std::min(span.n, begin + kScaleBlock - in_block), in_block - begin,
          index / kScaleBlock - span.first / kScaleBlock, block_keys(stream, index / kScaleBlock)};
}

template <class D>
HWY_INLINE Words<D> word0(D d, const Piece& piece, int64_t i) {
  return random_words(d, piece.keys.word0, i + piece.to_block);
}
template <class D>
HWY_INLINE Words<D> word1(D d, const Piece& piece, int64_t i) {
  return random_words(d, piece.keys.word1, i + piece.to_block);
}

template <StateFormat kFormat, class D>
HWY_INLINE Floats<D> load_exp_avg(D d, const AdamSpan& span, const Piece& piece, int64_t i) {
  if constexpr (has_codes(kFormat)) {
    return load_signed_codes(d, span.exp_avg_scale[piece.scale], span.exp_avg, i);
  } else if constexpr (has_random(kFormat)) {
    return load_bf16(d, span.exp_avg, i);
  } else {
    return load(d, span.exp_avg, i);
  }
}

// Of exp_avg_sq or of its maximum.
template <StateFormat kFormat, class D>
HWY_INLINE Floats<D> load_exp_avg_sq(D d, const std::byte* plane, const float* scales,
                                     const Piece& piece, int64_t i) {
  if constexpr (has_codes(kFormat)) {
    const Floats<D> root = load_root_codes(d, scales[piece.scale], plane, i);
    return hn::Mul(root, root);
  } else if constexpr (has_random(kFormat)) {
    return load_bf16(d, plane, i);
  } else {
    return load(d, plane, i);
  }
}

template <class D>
HWY_INLINE void store_out(D d, Floats<D> p, const AdamSpan& span, int64_t i) {
  if (span.out == nullptr) return;
  if (span.out_dtype == DType::f16) return store_u16(d, narrow_f16(d, p), span.out, i);
  store_u16(d, narrow_bf16(d, p), span.out, i);
}

// ---- moments in codes: a block is updated in fp32 here before its scale is known

struct Staged {
  alignas(64) float exp_avg[kScaleBlock];
  alignas(64) float root[kScaleBlock];      // of exp_avg_sq
  alignas(64) float max_root[kScaleBlock];  // of its maximum
};

struct EncodeExpAvg {
  const float* values;
  std::byte* to;
  float scale;
  Piece piece;
  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> value = hn::LoadU(d, values + i + piece.to_block);
    store_signed_codes(d, value, scale, word0(d, piece, i), to, i);
  }
};

struct EncodeRoot {
  const float* roots;
  std::byte* to;
  float scale;
  Piece piece;
  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> root = hn::LoadU(d, roots + i + piece.to_block);
    store_root_codes(d, root, scale, word1(d, piece, i), to, i);
  }
};

// `values` and `roots` are those of the whole block, of which the piece's are set.
HWY_INLINE void encode_exp_avg(const float* values, const Piece& piece, std::byte* to,
                               float* scales) {
  const float scale = largest(values + piece.begin + piece.to_block, piece.end - piece.begin);
  scales[piece.scale] = scale;
  for_lanes(EncodeExpAvg{values, to, scale, piece}, piece.begin, piece.end);
}
HWY_INLINE void encode_root(const float* roots, const Piece& piece, std::byte* to, float* scales) {
  const float scale = largest(roots + piece.begin + piece.to_block, piece.end - piece.begin);
  scales[piece.scale] = scale;
  for_lanes(EncodeRoot{roots, to, scale, piece}, piece.begin, piece.end);
}

// ---- the step

template <StateFormat kFormat, Rule kRule>
struct Step {
  Constants c;
  AdamSpan span;
  Piece piece;
  Staged* staged;

  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
    Floats<D> g = load_floats(d, span.grad_dtype, span.grad, i);
    g = hn::Mul(hn::Mul(g, hn::Set(d, c.unscale)), hn::Set(d, c.numbers.clip));
    const Floats<D> p = load_master<kFormat>(d, span.master, span.master_low, i);
    g = gradient_with_decay(d, c, g, p);
    const Floats<D> m = next_exp_avg<kRule>(d, c, g, load_exp_avg<kFormat>(d, span, piece, i));
    const Floats<D> v = next_exp_avg_sq<kRule>(
        d, c, g, load_exp_avg_sq<kFormat>(d, span.exp_avg_sq, span.exp_avg_sq_scale, piece, i));
    Floats<D> most = v;
    if constexpr (kAmsgrad) {
      most = hn::Max(
          v, load_exp_avg_sq<kFormat>(d, span.max_exp_avg_sq, span.max_exp_avg_sq_scale, piece, i));
    }
    const Floats<D> root = hn::Sqrt(most);
    const Floats<D> next = next_master<kRule>(d, c, p, m, root);
    Words<D> random = hn::Zero(hn::Rebind<uint32_t, D>());
    if constexpr (has_random(kFormat)) random = word0(d, piece, i);
    store_master<kFormat>(d, next, random, span.master, span.master_low, i);
    store_out(d, next, span, i);
    if constexpr (has_codes(kFormat)) {
      const int64_t at = i + piece.to_block;
      hn::StoreU(m, d, staged->exp_avg + at);
      if constexpr (kAmsgrad) {
        hn::StoreU(hn::Sqrt(v), d, staged->root + at);
        hn::StoreU(root, d, staged->max_root + at);
      } else {
        hn::StoreU(root, d, staged->root + at);
      }
    } else if constexpr (has_random(kFormat)) {
      const hn::Rebind<uint32_t, D> du;
      const Words<D> upper = hn::ShiftRight<16>(random);
      store_bf16_random(d, m, hn::And(random, hn::Set(du, 0xffffU)), span.exp_avg, i);
      store_bf16_random(d, v, upper, span.exp_avg_sq, i);
      if constexpr (kAmsgrad) store_bf16_random(d, most, upper, span.max_exp_avg_sq, i);
    } else {
      store(d, m, span.exp_avg, i);
      store(d, v, span.exp_avg_sq, i);
      if constexpr (kAmsgrad) store(d, most, span.max_exp_avg_sq, i);
    }
  }
};

template <StateFormat kFormat, Rule kRule>
void step(const AdamNumbers& numbers, const AdamSpan& span) {
  const uint64_t stream = stream_key(numbers.seed, numbers.step, span.parameter);
  Staged staged;
  for (Piece piece; piece.end < span.n;) {
    piece = piece_at<kFormat>(span, stream, piece.end);
    for_lanes(Step<kFormat, kRule>{constants_of(numbers), span, piece, &staged}, piece.begin,
              piece.end);
    if constexpr (has_codes(kFormat)) {
      encode_exp_avg(staged.exp_avg, piece, span.exp_avg, span.exp_avg_scale);
      encode_root(staged.root, piece, span.exp_avg_sq, span.exp_avg_sq_scale);
      if constexpr (kRule == Rule::torch_amsgrad) {
        encode_root(staged.max_root, piece, span.max_exp_avg_sq, span.max_exp_avg_sq_scale);
      }
    }
  }
}

template <StateFormat kFormat>
void step_by_rule(const AdamNumbers& numbers, const AdamSpan& span) {
  if (numbers.semantics == AdamSemantics::deepspeed) {
    step<kFormat, Rule::deepspeed>(numbers, span);
  } else if (numbers.amsgrad) {
    step<kFormat, Rule::torch_amsgrad>(numbers, span);
  } else {
    step<kFormat, Rule::torch>(numbers, span);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_ADAMW_INL_H_
