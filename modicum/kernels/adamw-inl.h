// AdamW's arithmetic, and one step over a span in the state formats without 8-bit codes. Internal
// to `kernels`; compiled once per target.
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

// Constants of one call of `adamw`.
struct Constants {
  AdamNumbers numbers;
  // The gradient's factors: `unscale`, negated for `maximize`, and `clip`. If one of them is 1 or
  // -1, `first` is their product and the gradient is multiplied only once, which gives the same
  // bits.
  float first, second;
  bool has_second;
  // As torch.lerp does, exp_avg moves towards the gradient from the nearer end: the result is
  // exp_avg or the gradient, plus lerp * (gradient - exp_avg).
  float lerp;          // 1 - beta1 from exp_avg, -beta1 from the gradient
  bool from_exp_avg;   // false: from the gradient
  bool adds_decay;     // L2: weight decay is added to the gradient
  bool decays_master;  // decoupled weight decay
  float inverse_bias2;
};

// Not inlined, so that the step reads its flags instead of computing them for each vector.
HWY_NOINLINE Constants constants_of(const AdamNumbers& n) {
  const bool near = std::fabs(n.one_minus_beta1) < 0.5F;
  const float unscale = n.maximize ? -n.unscale : n.unscale;
  const bool has_second = std::fabs(unscale) != 1 && n.clip != 1;
  // torch's decay is a factor: 1 for a weight_decay of 0, and 0 for lr * weight_decay == 1.
  const float no_decay = n.semantics == AdamSemantics::torch ? 1.0F : 0.0F;
  return {n,
          has_second ? unscale : unscale * n.clip,
          n.clip,
          has_second,
          near ? n.one_minus_beta1 : n.one_minus_beta1 - 1.0F,
          near,
          !n.decoupled && n.decay != 0,
          n.decoupled && n.decay != no_decay,
          1 / n.bias2};
}

template <class D>
HWY_INLINE Floats<D> scaled(D d, const Constants& c, Floats<D> g) {
  g = hn::Mul(g, hn::Set(d, c.first));
  return c.has_second ? hn::Mul(g, hn::Set(d, c.second)) : g;
}

template <class D>
HWY_INLINE Floats<D> with_decay(D d, const Constants& c, Floats<D> g, Floats<D> p) {
  if (!c.adds_decay) return g;
  return fma(d, p, hn::Set(d, c.numbers.decay), g);
}

template <Rule kRule, class D>
HWY_INLINE Floats<D> next_exp_avg(D d, const Constants& c, Floats<D> g, Floats<D> m) {
  if constexpr (kRule == Rule::deepspeed) {
    const Floats<D> kept = hn::Mul(m, hn::Set(d, c.numbers.beta1));
    return fma(d, g, hn::Set(d, c.numbers.one_minus_beta1), kept);
  } else {
    const Floats<D> apart = hn::Sub(g, m);
    const Floats<D> weight = hn::Set(d, c.lerp);
    if (c.from_exp_avg) return fma(d, weight, apart, m);
    return fma(d, weight, apart, g);
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

// `kOneDivision` computes the denominator by fma instead of a division. It is for moments in codes,
// whose rounding error is far larger.
template <Rule kRule, bool kOneDivision, class D>
HWY_INLINE Floats<D> next_master(D d, const Constants& c, Floats<D> p, Floats<D> m,
                                 Floats<D> root) {
  const AdamNumbers& n = c.numbers;
  const Floats<D> decay = hn::Set(d, n.decay);
  const Floats<D> step_size = hn::Set(d, n.step_size);
  const Floats<D> eps = hn::Set(d, n.eps);
  if constexpr (kRule == Rule::deepspeed) {
    const Floats<D> update = hn::Div(m, fma(d, root, hn::Set(d, n.bias2), eps));
    if (c.decays_master) p = fma(d, p, decay, p);
    return fma(d, update, step_size, p);
  } else {
    const Floats<D> denominator = kOneDivision ? fma(d, root, hn::Set(d, c.inverse_bias2), eps)
                                               : hn::Add(hn::Div(root, hn::Set(d, n.bias2)), eps);
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

// Calls op.pair(d, i) for two vectors while they fit; returns where the rest begins.
template <class Op>
HWY_INLINE int64_t for_pairs(const Op& op, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + 2 * lanes <= end; i += 2 * lanes) op.pair(d, i);
  return i;
}
// Vectors are stepped in pairs if the gradients are bf16, all planes of the state have at most 16
// bits per element and no copy goes to `out`, since packing a single vector costs as much as its
// arithmetic. has_pairs is the condition on the format, pairs_of the one that is known only at run
// time.
constexpr bool has_pairs(StateFormat format) {
  return HWY_TARGET != HWY_SCALAR && has_random(format) && is_split(format);
}
inline bool pairs_of(const AdamSpan& span) {
  return span.grad_dtype == DType::bf16 && span.out == nullptr;
}

// Part of a span: all of it, or, if the format has random bits or scales, its elements of one
// block.
struct Piece {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t to_block = 0;  // element i of the span is element i + to_block of the block
  int64_t scale = 0;     // index of the block's scales
  BlockKeys keys = {};
};

// The pieces of a span, in order.
template <StateFormat kFormat>
class Pieces {
 public:
  Pieces(const AdamSpan& span, uint64_t stream)
      : n_(span.n),
        stream_(stream),
        row_(ScaleBlocks(span.row).row()),
        column_(span.first % row_),
        first_block_(ScaleBlocks(span.row).block_of(span.first)) {}

  bool next(Piece& piece) {
    if (end_ == n_) return false;
    if constexpr (!has_random(kFormat)) {
      end_ = n_;
      piece = {0, n_, 0, 0, {}};
      return true;
    }
    const int64_t in_block = column_ % kScaleBlock;
    const int64_t n = std::min({kScaleBlock - in_block, row_ - column_, n_ - end_});
    piece = {end_, end_ + n, in_block - end_, blocks_, keys_of(blocks_)};
    advance(1, n);
    return true;
  }

  // Takes the next complete blocks, at most `most`, and stores their keys. Returns their number,
  // which is 0 if the next piece is not a complete block.
  int64_t next_complete(int64_t most, BlockKeys* keys) {
    if (column_ % kScaleBlock != 0) return 0;
    const int64_t count = std::min(most, std::min(row_ - column_, n_ - end_) / kScaleBlock);
    for (int64_t b = 0; b < count; ++b) keys[b] = keys_of(blocks_ + b);
    advance(count, count * kScaleBlock);
    return count;
  }
  int64_t end() const { return end_; }
  int64_t blocks() const { return blocks_; }

 private:
  BlockKeys keys_of(int64_t block) const { return block_keys(stream_, first_block_ + block); }
  void advance(int64_t blocks, int64_t n) {
    blocks_ += blocks;
    end_ += n;
    column_ += n;
    if (column_ == row_) column_ = 0;
  }

  const int64_t n_;
  const uint64_t stream_;
  const int64_t row_;
  int64_t column_;  // column of element end_ in its row
  const int64_t first_block_;
  int64_t blocks_ = 0;  // blocks already returned
  int64_t end_ = 0;     // end of the last piece
};

template <class D>
HWY_INLINE Words<D> random_words(D d, const Piece& piece, int64_t i) {
  return random_words(d, piece.keys.word, i + piece.to_block);
}

// The scale of a piece; 0 in a format without scales.
template <StateFormat kFormat>
HWY_INLINE float scale_at(const float* scales, const Piece& piece) {
  if constexpr (has_codes(kFormat)) return scales[piece.scale];
  return 0;
}

template <StateFormat kFormat, class D>
HWY_INLINE Floats<D> load_exp_avg(D d, const std::byte* plane, float scale, int64_t i) {
  if constexpr (has_codes(kFormat)) {
    return signed_value(d, load_codes(d, plane, i), scale);
  } else if constexpr (has_random(kFormat)) {
    return load_bf16(d, plane, i);
  } else {
    return load(d, plane, i);
  }
}

// Loads exp_avg_sq or max_exp_avg_sq.
template <StateFormat kFormat, class D>
HWY_INLINE Floats<D> load_exp_avg_sq(D d, const std::byte* plane, float scale, int64_t i) {
  if constexpr (has_codes(kFormat)) {
    const Floats<D> root = root_value(d, load_codes(d, plane, i), scale);
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

// ---- the step

// A vector of parameters, exp_avg, exp_avg_sq and max_exp_avg_sq.
template <class D>
struct Elements {
  Floats<D> p, m, v, most;
};

template <StateFormat kFormat, Rule kRule>
struct Step {
  static constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  static constexpr bool kPairs = has_pairs(kFormat);
  Constants c;
  AdamSpan span;
  Piece piece;

  template <class D>
  HWY_INLINE Elements<D> next(D d, Floats<D> g, const Elements<D>& old) const {
    g = with_decay(d, c, scaled(d, c, g), old.p);
    const Floats<D> m = next_exp_avg<kRule>(d, c, g, old.m);
    const Floats<D> v = next_exp_avg_sq<kRule>(d, c, g, old.v);
    const Floats<D> most = kAmsgrad ? hn::Max(v, old.most) : v;
    return {next_master<kRule, false>(d, c, old.p, m, hn::Sqrt(most)), m, v, most};
  }

  template <class D>
  HWY_INLINE void operator()(D d, int64_t i) const {
    const Floats<D> g = load_floats(d, span.grad_dtype, span.grad, i);
    Elements<D> old{load_master<kFormat>(d, span.master, span.master_low, i),
                    load_exp_avg<kFormat>(d, span.exp_avg, 0, i),
                    load_exp_avg_sq<kFormat>(d, span.exp_avg_sq, 0, i), hn::Zero(d)};
    if constexpr (kAmsgrad) old.most = load_exp_avg_sq<kFormat>(d, span.max_exp_avg_sq, 0, i);
    const Elements<D> now = next(d, g, old);
    Words<D> random = hn::Zero(hn::Rebind<uint32_t, D>());
    if constexpr (has_random(kFormat)) random = random_words(d, piece, i);
    store_master<kFormat>(d, now.p, random, span, i);
    store_out(d, now.p, span, i);
    if constexpr (has_random(kFormat)) {
      // The lower half of the random word rounds exp_avg, the upper half exp_avg_sq and its
      // maximum.
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

  template <class D>
  HWY_INLINE void pair(D d, int64_t i) const {
    const auto g = load_bf16_pair(d, span.grad, i);
    const auto p = load_master_pair<kFormat>(d, span.master, span.master_low, i);
    const auto m = load_bf16_pair(d, span.exp_avg, i);
    const auto v = load_bf16_pair(d, span.exp_avg_sq, i);
    Pair<Floats<D>> most{hn::Zero(d), hn::Zero(d)};
    if constexpr (kAmsgrad) most = load_bf16_pair(d, span.max_exp_avg_sq, i);
    const auto even = next(d, g.even, {p.even, m.even, v.even, most.even});
    const auto odd = next(d, g.odd, {p.odd, m.odd, v.odd, most.odd});
    const auto random = random_word_pair(d, piece.keys.word, i + piece.to_block);
    store_master_pair<kFormat>(d, {even.p, odd.p}, random, span, i);
    store_moment_pairs(d, even, odd, random, i);
  }

  template <class D>
  HWY_INLINE void store_moment_pairs(D d, const Elements<D>& even, const Elements<D>& odd,
                                     const Pair<Words<D>>& random, int64_t i) const {
    const hn::Rebind<uint32_t, D> du;
    const Words<D> lower = hn::Set(du, 0xffffU);
    const Pair<Words<D>> of_m{hn::And(random.even, lower), hn::And(random.odd, lower)};
    const Pair<Words<D>> of_v{hn::ShiftRight<16>(random.even), hn::ShiftRight<16>(random.odd)};
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

// One step in a format without codes.
template <StateFormat kFormat, Rule kRule>
void step_in_floats(const AdamNumbers& numbers, const AdamSpan& span) {
  using StepOf = Step<kFormat, kRule>;
  const Constants constants = constants_of(numbers);
  Pieces<kFormat> pieces(span, stream_key(numbers.seed, numbers.step, span.parameter));
  for (Piece piece; pieces.next(piece);) {
    const StepOf op{constants, span, piece};
    int64_t i = piece.begin;
    if constexpr (StepOf::kPairs) {
      if (pairs_of(span)) i = for_pairs(op, i, piece.end);
    }
    for_lanes(op, i, piece.end);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace modicum
HWY_AFTER_NAMESPACE();

#endif  // MODICUM_KERNELS_ADAMW_INL_H_
