// One AdamW step over a span, in every state format. Internal to `kernels`; compiled once per
// target.
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

// ---- the arithmetic, rounding by rounding (docs/internals/numerics.md)

enum class Rule : uint8_t { torch, torch_amsgrad, deepspeed };

// Constants of a call.
struct Constants {
  AdamNumbers numbers;
  float unscale;       // negated for `maximize`, which is exact
  float lerp;          // weight of the interpolation, from the nearer end as in torch.lerp
  bool from_exp_avg;   // whether the nearer end is exp_avg
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
    // A blend: GCC compiles `?:` to a round trip through memory.
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

// Calls op(d, i) to cover [begin, end): with full vectors, then with single lanes.
template <class Op>
HWY_INLINE void for_lanes(const Op& op, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) op(d, i);
  for (; i < end; ++i) op(OneLane(), i);
}

// A piece of a span: all of it, or one block if the format has block keys or scales.
struct Piece {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t to_block = 0;  // element i of the span is element i + to_block of the block
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

// Of exp_avg_sq or max_exp_avg_sq.
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
  alignas(64) float max_root[kScaleBlock];  // of max_exp_avg_sq
};

struct EncodeExpAvg {
  const float* values;
  std::byte* to;
  float scale;
  Piece piece;
  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> value = hn::LoadU(d, values + i + piece.to_block);
    store_signed_codes(d, value, scale, word0(d, piece, i), to + i);
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
    store_root_codes(d, root, scale, word1(d, piece, i), to + i);
  }
};

// `values` and `roots` cover the whole block; only the piece's elements are set.
HWY_INLINE void encode_exp_avg(float* values, const Piece& piece, std::byte* to, float* scales) {
  const float scale = scale_of(values + piece.begin + piece.to_block, piece.end - piece.begin);
  scales[piece.scale] = scale;
  for_lanes(EncodeExpAvg{values, to, scale, piece}, piece.begin, piece.end);
}
HWY_INLINE void encode_root(float* roots, const Piece& piece, std::byte* to, float* scales) {
  const float scale = scale_of(roots + piece.begin + piece.to_block, piece.end - piece.begin);
  scales[piece.scale] = scale;
  for_lanes(EncodeRoot{roots, to, scale, piece}, piece.begin, piece.end);
}

// ---- the step

// Loads and stores of a step.
template <class D>
struct Elements {
  Floats<D> p, m, v, most;
};

template <StateFormat kFormat, Rule kRule>
struct Step {
  static constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  Constants c;
  AdamSpan span;
  Piece piece;
  Staged* staged;

  // `root`: of `most` as it will be.
  template <class D>
  HWY_INLINE Elements<D> next(D d, Floats<D> g, const Elements<D>& old, Floats<D>* root) const {
    g = hn::Mul(hn::Mul(g, hn::Set(d, c.unscale)), hn::Set(d, c.numbers.clip));
    g = gradient_with_decay(d, c, g, old.p);
    const Floats<D> m = next_exp_avg<kRule>(d, c, g, old.m);
    const Floats<D> v = next_exp_avg_sq<kRule>(d, c, g, old.v);
    const Floats<D> most = kAmsgrad ? hn::Max(v, old.most) : v;
    *root = hn::Sqrt(most);
    return {next_master<kRule>(d, c, old.p, m, *root), m, v, most};
  }

  template <class D>
  HWY_INLINE Floats<D> load_square(D d, const std::byte* plane, const float* scales,
                                   int64_t i) const {
    return load_exp_avg_sq<kFormat>(d, plane, scales, piece, i);
  }

  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> g = load_floats(d, span.grad_dtype, span.grad, i);
    Elements<D> old{load_master<kFormat>(d, span.master, span.master_low, i),
                    load_exp_avg<kFormat>(d, span, piece, i),
                    load_square(d, span.exp_avg_sq, span.exp_avg_sq_scale, i), hn::Zero(d)};
    if constexpr (kAmsgrad) {
      old.most = load_square(d, span.max_exp_avg_sq, span.max_exp_avg_sq_scale, i);
    }
    Floats<D> root;
    const Elements<D> now = next(d, g, old, &root);
    Words<D> random = hn::Zero(hn::Rebind<uint32_t, D>());
    if constexpr (has_random(kFormat)) random = word0(d, piece, i);
    store_master<kFormat>(d, now.p, random, span, i);
    store_out(d, now.p, span, i);
    if constexpr (has_codes(kFormat)) {
      const int64_t at = i + piece.to_block;
      hn::StoreU(now.m, d, staged->exp_avg + at);
      hn::StoreU(kAmsgrad ? hn::Sqrt(now.v) : root, d, staged->root + at);
      if constexpr (kAmsgrad) hn::StoreU(root, d, staged->max_root + at);
    } else if constexpr (has_random(kFormat)) {
      const hn::Rebind<uint32_t, D> du;
      const Words<D> upper = hn::ShiftRight<16>(random);
      store_bf16_random(d, now.m, hn::And(random, hn::Set(du, 0xffffU)), span.exp_avg, i);
      store_bf16_random(d, now.v, upper, span.exp_avg_sq, i);
      if constexpr (kAmsgrad) store_bf16_random(d, now.most, upper, span.max_exp_avg_sq, i);
    } else {
      store(d, now.m, span.exp_avg, i);
      store(d, now.v, span.exp_avg_sq, i);
      if constexpr (kAmsgrad) store(d, now.most, span.max_exp_avg_sq, i);
    }
  }

  // Two vectors at a time if every plane has 16 bits per element: packing a single vector costs as
  // much as its arithmetic.
  bool has_pairs() const {
    return kFormat == StateFormat::bf16_moments && span.grad_dtype == DType::bf16 &&
           span.out == nullptr;
  }
  template <class D>
  HWY_INLINE Pair<Floats<D>> load_bf16_pair(D d, const std::byte* plane, int64_t i) const {
    const auto words = load_u16_pair(d, plane, i);
    return {hn::BitCast(d, words.even), hn::BitCast(d, words.odd)};
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t i) const {
    const hn::Rebind<uint32_t, D> du;
    const auto g = load_bf16_pair(d, span.grad, i);
    const auto p = load_master_pair(d, span.master, span.master_low, i);
    const auto m = load_bf16_pair(d, span.exp_avg, i);
    const auto v = load_bf16_pair(d, span.exp_avg_sq, i);
    Pair<Floats<D>> most{hn::Zero(d), hn::Zero(d)};
    if constexpr (kAmsgrad) most = load_bf16_pair(d, span.max_exp_avg_sq, i);
    Floats<D> root;
    const auto even = next(d, g.even, {p.even, m.even, v.even, most.even}, &root);
    const auto odd = next(d, g.odd, {p.odd, m.odd, v.odd, most.odd}, &root);
    const auto random = random_word_pair(d, piece.keys.word0, i + piece.to_block);
    const Words<D> lower = hn::Set(du, 0xffffU);
    const Pair<Words<D>> of_m{hn::And(random.even, lower), hn::And(random.odd, lower)};
    const Pair<Words<D>> of_v{hn::ShiftRight<16>(random.even), hn::ShiftRight<16>(random.odd)};
    store_master_pair(d, {even.p, odd.p}, span.master, span.master_low, i);
    store_random_pair(d, {even.m, odd.m}, of_m, span.exp_avg, i);
    store_random_pair(d, {even.v, odd.v}, of_v, span.exp_avg_sq, i);
    if constexpr (kAmsgrad) {
      store_random_pair(d, {even.most, odd.most}, of_v, span.max_exp_avg_sq, i);
    }
  }
  template <class D>
  HWY_INLINE void store_random_pair(D d, const Pair<Floats<D>>& v, const Pair<Words<D>>& random16,
                                    std::byte* to, int64_t i) const {
    const auto even = hn::Add(bits_of(d, v.even), random16.even);
    const auto odd = hn::Add(bits_of(d, v.odd), random16.odd);
    store_u16_pair(d, {even, odd}, to, i);
  }
};

// As for_lanes, but calls op.pair(d, i) for two vectors while they fit.
template <class Op>
HWY_INLINE void for_pairs(const Op& op, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + 2 * lanes <= end; i += 2 * lanes) op.pair(d, i);
  for_lanes(op, i, end);
}

template <StateFormat kFormat, Rule kRule>
void step(const AdamNumbers& numbers, const AdamSpan& span) {
  const uint64_t stream = stream_key(numbers.seed, numbers.step, span.parameter);
  Staged staged;
  for (Piece piece; piece.end < span.n;) {
    piece = piece_at<kFormat>(span, stream, piece.end);
    const Step<kFormat, kRule> op{constants_of(numbers), span, piece, &staged};
    if constexpr (kFormat == StateFormat::bf16_moments) {
      if (op.has_pairs()) {
        for_pairs(op, piece.begin, piece.end);
        continue;
      }
    }
    for_lanes(op, piece.begin, piece.end);
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
