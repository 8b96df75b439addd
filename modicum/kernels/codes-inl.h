// One AdamW step over a span with moments in 8-bit codes. Internal to `kernels`; compiled once per
// target.
#if defined(MODICUM_KERNELS_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_CODES_INL_H_
#undef MODICUM_KERNELS_CODES_INL_H_
#else
#define MODICUM_KERNELS_CODES_INL_H_
#endif

#include <hwy/cache_control.h>

#include "modicum/kernels/adamw-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// A run is up to kRunBlocks blocks of kScaleBlock elements, or a shorter block, or part of one. It
// is stepped in short passes: the codes of a block depend on its largest moments, and a processor
// overlaps more iterations of short loop bodies than of a long one.
//
//   moments   gradient, old codes          -> new moments in fp32, staged; then their scales
//   random    keys                         -> random words, staged
//   masters   staged moments, old master   -> new master
//   codes     staged moments and words     -> new codes
constexpr int64_t kRunBlocks = 4;
constexpr int64_t kRunElements = kRunBlocks * kScaleBlock;

// Prefetches the planes this many elements ahead: two runs. With AVX-512 one thread was 3 % faster
// than with the processor's own prefetching alone.
constexpr int64_t kAhead = 2 * kRunElements;
HWY_INLINE void fetch_ahead(const std::byte* plane, int64_t i, int64_t bytes) {
  hwy::Prefetch(plane + (i + kAhead) * bytes);
}

// The scale of one moment, and its factors for encoding, in each block of the run.
struct MomentBlocks {
  float scale[kRunBlocks] = {};
  float per[kRunBlocks];       // per_value
  float per_step[kRunBlocks];  // least_per_step; only for roots
};

// The moments of a run in fp32, and its random words. If vectors are stepped in pairs, each pair
// has first its elements with even indices, then those with odd indices.
struct StagedRun {
  alignas(64) float exp_avg[kRunElements];
  alignas(64) float magnitude[kRunElements];  // of exp_avg
  alignas(64) float root[kRunElements];       // of exp_avg_sq
  alignas(64) float max_root[kRunElements];   // of max_exp_avg_sq
  alignas(64) uint32_t random[kRunElements];
  MomentBlocks of_exp_avg, of_root, of_max_root;
};

// Element k of a run is element begin + k of the span, and in block k / kScaleBlock of the run.
struct Run {
  int64_t begin = 0;
  int64_t n = 0;
  int64_t scale = 0;     // index of the first block's scales
  int64_t in_block = 0;  // index of the first element within its block
  BlockKeys keys[kRunBlocks] = {};

  // Calls op(block, first element, number of elements) for each block.
  template <class Op>
  HWY_INLINE void by_block(const Op& op) const {
    for (int64_t k = 0; k < n; k += kScaleBlock) {
      op(k / kScaleBlock, k, std::min(kScaleBlock, n - k));
    }
  }
};

// ---- the pass `moments`

template <StateFormat kFormat, Rule kRule>
struct Moments {
  static constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  Constants c;
  AdamSpan span;
  const Run* run;
  StagedRun* staged;
  int64_t begin = run->begin;

  template <class D>
  struct OldMoments {
    Floats<D> g, m, v, most;
  };
  // Stages the new moments of the vector that begins at element k.
  template <class D>
  HWY_INLINE void stage(D d, const OldMoments<D>& old, int64_t k) const {
    const Floats<D> m = next_exp_avg<kRule>(d, c, old.g, old.m);
    const Floats<D> v = next_exp_avg_sq<kRule>(d, c, old.g, old.v);
    hn::StoreU(m, d, staged->exp_avg + k);
    hn::StoreU(hn::Abs(m), d, staged->magnitude + k);
    hn::StoreU(hn::Sqrt(v), d, staged->root + k);
    if constexpr (kAmsgrad) hn::StoreU(hn::Sqrt(hn::Max(v, old.most)), d, staged->max_root + k);
  }
  float scale_at(const float* scales, int64_t k) const {
    return scales[run->scale + k / kScaleBlock];
  }
  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const int64_t i = begin + k;
    OldMoments<D> old;
    old.g = scaled(d, c, load_floats(d, span.grad_dtype, span.grad, i));
    if (c.adds_decay) {
      const Floats<D> p = load_master<kFormat>(d, span.master, span.master_low, i);
      old.g = with_decay(d, c, old.g, p);
    }
    old.m = load_exp_avg<kFormat>(d, span.exp_avg, scale_at(span.exp_avg_scale, k), i);
    old.v = load_exp_avg_sq<kFormat>(d, span.exp_avg_sq, scale_at(span.exp_avg_sq_scale, k), i);
    if constexpr (kAmsgrad) {
      const float scale = scale_at(span.max_exp_avg_sq_scale, k);
      old.most = load_exp_avg_sq<kFormat>(d, span.max_exp_avg_sq, scale, i);
    }
    stage(d, old, k);
  }
  template <class D>
  HWY_INLINE Pair<Floats<D>> square_pair(D d, const std::byte* codes, const float* scales,
                                         int64_t k) const {
    const auto root = root_pair(d, codes, begin + k, scale_at(scales, k));
    return {hn::Mul(root.even, root.even), hn::Mul(root.odd, root.odd)};
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const int64_t i = begin + k;
    fetch_ahead(span.grad, i, 2);
    fetch_ahead(span.exp_avg, i, 1);
    fetch_ahead(span.exp_avg_sq, i, 1);
    auto g = load_bf16_pair(d, span.grad, i);
    g = {scaled(d, c, g.even), scaled(d, c, g.odd)};
    if (c.adds_decay) {
      const auto p = load_master_pair<kFormat>(d, span.master, span.master_low, i);
      g = {with_decay(d, c, g.even, p.even), with_decay(d, c, g.odd, p.odd)};
    }
    const auto m = signed_pair(d, span.exp_avg, i, scale_at(span.exp_avg_scale, k));
    const auto v = square_pair(d, span.exp_avg_sq, span.exp_avg_sq_scale, k);
    Pair<Floats<D>> most = v;
    if constexpr (kAmsgrad) {
      most = square_pair(d, span.max_exp_avg_sq, span.max_exp_avg_sq_scale, k);
    }
    stage(d, OldMoments<D>{g.even, m.even, v.even, most.even}, k);
    stage(d, OldMoments<D>{g.odd, m.odd, v.odd, most.odd}, k + static_cast<int64_t>(hn::Lanes(d)));
  }
};

// Sets the scale of each block of a run to the largest of its magnitudes.
HWY_INLINE void measure(const Run& run, const float* magnitudes, MomentBlocks& blocks) {
#if HWY_TARGET != HWY_SCALAR
  if (run.n == kRunElements) return largest_of_four(magnitudes, blocks.scale);
#endif
  run.by_block(
      [&](int64_t b, int64_t k, int64_t n) { blocks.scale[b] = largest(magnitudes + k, n); });
}

// Sets the scales of a run; returns false if a moment exceeds kMaxCoded or is NaN.
template <bool kAmsgrad>
HWY_INLINE bool set_scales(const AdamSpan& span, const Run& run, StagedRun& staged) {
  const hn::CappedTag<float, kRunBlocks> d;
  measure(run, staged.magnitude, staged.of_exp_avg);
  measure(run, staged.root, staged.of_root);
  if constexpr (kAmsgrad) measure(run, staged.max_root, staged.of_max_root);
  const auto block_count = static_cast<size_t>((run.n + kScaleBlock - 1) / kScaleBlock);
  bool fits = true;
  for (int64_t b = 0; b < kRunBlocks; b += static_cast<int64_t>(hn::Lanes(d))) {
    const auto scale = hn::LoadU(d, staged.of_exp_avg.scale + b);
    hn::StoreU(per_value<kSignedPlaces>(d, scale), d, staged.of_exp_avg.per + b);
    fits = fits && hn::AllTrue(d, hn::Le(scale, hn::Set(d, kMaxCoded)));
    const auto set = [&](MomentBlocks& blocks) {
      const auto root = hn::LoadU(d, blocks.scale + b);
      hn::StoreU(per_value<kRootPlaces>(d, root), d, blocks.per + b);
      hn::StoreU(least_per_step(d, scale, root), d, blocks.per_step + b);
      fits = fits && hn::AllTrue(d, hn::Le(root, hn::Set(d, kMaxCoded)));
    };
    set(staged.of_root);
    if constexpr (kAmsgrad) set(staged.of_max_root);
  }
  std::copy_n(staged.of_exp_avg.scale, block_count, span.exp_avg_scale + run.scale);
  std::copy_n(staged.of_root.scale, block_count, span.exp_avg_sq_scale + run.scale);
  if constexpr (kAmsgrad)
    std::copy_n(staged.of_max_root.scale, block_count, span.max_exp_avg_sq_scale + run.scale);
  return fits;
}

// ---- the pass `random`

struct RandomWords {
  AdamSpan span;
  const Run* run;
  StagedRun* staged;

  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const uint32_t* keys = run->keys[k / kScaleBlock].word;
    const Words<D> words = random_words(d, keys, run->in_block + k % kScaleBlock);
    hn::StoreU(words, hn::Rebind<uint32_t, D>(), staged->random + k);
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const uint32_t* keys = run->keys[k / kScaleBlock].word;
    store(d, random_word_pair(d, keys, run->in_block + k % kScaleBlock), k);
  }
  // For kRunBlocks complete blocks. The inner loop is over the blocks: equal places in all blocks
  // have equal counters.
  template <class D>
  HWY_INLINE void all_pairs(D d) const {
    const hn::Rebind<uint32_t, D> du;
    const int64_t step = 2 * static_cast<int64_t>(hn::Lanes(d));
    const Words<D> factor = hn::Set(du, kCounterFactor);
    Words<D> even = hn::Mul(hn::ShiftLeft<1>(hn::Iota(du, 0)), factor);
    for (int64_t k = 0; k < kScaleBlock; k += step) {
      const Words<D> odd = hn::Add(even, factor);
      for (int64_t b = 0; b < kRunBlocks; ++b) {
        const uint32_t* keys = run->keys[b].word;
        const Words<D> first = hn::Set(du, keys[0]);
        store(d,
              {hashed(d, hn::Add(even, first), keys[1]), hashed(d, hn::Add(odd, first), keys[1])},
              b * kScaleBlock + k);
      }
      even = hn::Add(even, hn::Set(du, static_cast<uint32_t>(step) * kCounterFactor));
    }
  }

 private:
  template <class D>
  HWY_INLINE void store(D d, const Pair<Words<D>>& words, int64_t k) const {
    const hn::Rebind<uint32_t, D> du;
    hn::StoreU(words.even, du, staged->random + k);
    hn::StoreU(words.odd, du, staged->random + k + static_cast<int64_t>(hn::Lanes(d)));
  }
};

// ---- the pass `masters`

template <StateFormat kFormat, Rule kRule>
struct Masters {
  Constants c;
  AdamSpan span;
  const Run* run;
  StagedRun* staged;
  const float* roots = kRule == Rule::torch_amsgrad ? staged->max_root : staged->root;
  int64_t begin = run->begin;

  template <class D>
  HWY_INLINE Floats<D> next(D d, Floats<D> p, int64_t k) const {
    const Floats<D> m = hn::LoadU(d, staged->exp_avg + k);
    return next_master<kRule, true>(d, c, p, m, hn::LoadU(d, roots + k));
  }
  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const hn::Rebind<uint32_t, D> du;
    const int64_t i = begin + k;
    const Floats<D> p = next(d, load_master<kFormat>(d, span.master, span.master_low, i), k);
    const Words<D> random = hn::LoadU(du, staged->random + k);
    store_master<kFormat>(d, p, random, span, i);
    store_out(d, p, span, i);
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const hn::Rebind<uint32_t, D> du;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    fetch_ahead(span.master, begin + k, 2);
    fetch_ahead(span.master_low, begin + k, kFormat == StateFormat::int8_moments_24 ? 1 : 2);
    const auto p = load_master_pair<kFormat>(d, span.master, span.master_low, begin + k);
    const Pair<Words<D>> random{hn::LoadU(du, staged->random + k),
                                hn::LoadU(du, staged->random + k + lanes)};
    const Pair<Floats<D>> now{next(d, p.even, k), next(d, p.odd, k + lanes)};
    store_master_pair<kFormat>(d, now, random, span, begin + k);
  }
};

// ---- the pass `codes`

template <bool kAmsgrad>
struct Codes {
  AdamSpan span;
  const StagedRun* staged;
  int64_t begin;  // begin of the run in the span

  template <class D>
  HWY_INLINE Words<D> random(D, int64_t k) const {
    return hn::LoadU(hn::Rebind<uint32_t, D>(), staged->random + k);
  }
  // Rounded offsets of exp_avg, of block b.
  template <class D>
  HWY_INLINE Words<D> exp_avg(D d, int64_t b, int64_t k) const {
    const Floats<D> magnitude = hn::LoadU(d, staged->magnitude + k);
    const Floats<D> offset = offset_of(d, magnitude, staged->of_exp_avg.per[b]);
    return rounded<kSignedPlaces>(d, offset, signed_random(d, random(d, k)));
  }
  template <class D>
  HWY_INLINE Words<D> exp_avg_code(D d, int64_t k, Words<D> z) const {
    return signed_code(d, z, hn::LoadU(d, staged->exp_avg + k));
  }
  struct Roots {
    const float* staged;
    const MomentBlocks& blocks;
  };
  Roots roots() const { return {staged->root, staged->of_root}; }
  Roots max_roots() const { return {staged->max_root, staged->of_max_root}; }

  // Rounded offsets of roots, not capped; 0 for a root of 0. `z`: the rounded offset of exp_avg.
  template <class D>
  HWY_INLINE Words<D> root(D d, const Roots& from, int64_t b, int64_t k, Words<D> z) const {
    const Floats<D> root = hn::LoadU(d, from.staged + k);
    const Words<D> offset = hn::Max(bits_of(d, offset_of(d, root, from.blocks.per[b])),
                                    bits_of(d, least_of(d, z, from.blocks.per_step[b])));
    return zero_for_zero(d, hn::Add(offset, root_random(d, random(d, k))), root);
  }
  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const int64_t i = begin + k;
    const int64_t b = k / kScaleBlock;
    const Words<D> z = exp_avg(d, b, k);
    const auto code = [&](const Roots& from) { return root_code(d, root(d, from, b, k, z)); };
    store_codes(d, exp_avg_code(d, k, z), span.exp_avg, i);
    store_codes(d, code(roots()), span.exp_avg_sq, i);
    if constexpr (kAmsgrad) store_codes(d, code(max_roots()), span.max_exp_avg_sq, i);
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const int64_t i = begin + k;
    const int64_t b = k / kScaleBlock;
    const int64_t next = k + static_cast<int64_t>(hn::Lanes(d));
    const Pair<Words<D>> z{exp_avg(d, b, k), exp_avg(d, b, next)};
    const auto codes = [&](const Roots& from) {
      return root_codes(d, {root(d, from, b, k, z.even), root(d, from, b, next, z.odd)});
    };
    const Pair<Words<D>> m{exp_avg_code(d, k, z.even), exp_avg_code(d, next, z.odd)};
    store_codes_of_both(d, halves_of(d, m), codes(roots()), span, i);
    if constexpr (kAmsgrad) store_lower_bytes(d, codes(max_roots()), span.max_exp_avg_sq, i);
  }
};

// ---- a step

// Makes a pass over a run in pairs of vectors while they fit; returns where the rest begins.
template <class Pass>
HWY_INLINE int64_t cover_pairs(const Pass& pass, const Run& run) {
  return for_pairs(pass, 0, run.n);
}
HWY_INLINE int64_t cover_pairs(const RandomWords& pass, const Run& run) {
  if (run.n < kRunElements) return for_pairs(pass, 0, run.n);
  pass.all_pairs(hn::ScalableTag<float>());
  return run.n;
}

template <StateFormat kFormat, class Pass>
HWY_INLINE void cover(const Pass& pass, const Run& run) {
  int64_t k = 0;
  if constexpr (has_pairs(kFormat)) {
    if (pairs_of(pass.span)) k = cover_pairs(pass, run);
  }
  for_lanes(pass, k, run.n);
}

template <StateFormat kFormat, Rule kRule>
HWY_INLINE void step_run(const Constants& c, const AdamSpan& span, const Run& run,
                         StagedRun& staged) {
  constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  cover<kFormat>(Moments<kFormat, kRule>{c, span, &run, &staged}, run);
  const bool fits = set_scales<kAmsgrad>(span, run, staged);
  cover<kFormat>(RandomWords{span, &run, &staged}, run);
  cover<kFormat>(Masters<kFormat, kRule>{c, span, &run, &staged}, run);
  if (!fits) {  // only the stored moments are clamped: the masters have been stepped
    clamp_to_codes(staged.exp_avg, run.n);
    clamp_to_codes(staged.magnitude, run.n);
    clamp_to_codes(staged.root, run.n);
    if constexpr (kAmsgrad) clamp_to_codes(staged.max_root, run.n);
    set_scales<kAmsgrad>(span, run, staged);
  }
  cover<kFormat>(Codes<kAmsgrad>{span, &staged, run.begin}, run);
}

// Sets `run` to the next run; false after the last.
template <StateFormat kFormat>
HWY_INLINE bool next_run(Pieces<kFormat>& pieces, Run& run) {
  run.begin = pieces.end();
  run.scale = pieces.blocks();
  run.in_block = 0;
  run.n = kScaleBlock * pieces.next_complete(kRunBlocks, run.keys);
  if (run.n > 0) return true;
  Piece piece;
  if (!pieces.next(piece)) return false;
  run.n = piece.end - piece.begin;
  run.in_block = piece.begin + piece.to_block;
  run.keys[0] = piece.keys;
  return true;
}

template <StateFormat kFormat, Rule kRule>
void step_in_codes(const AdamNumbers& numbers, const AdamSpan& span) {
  const Constants constants = constants_of(numbers);
  Pieces<kFormat> pieces(span, stream_key(numbers.seed, numbers.step, span.parameter));
  StagedRun staged;
  for (Run run; next_run(pieces, run);) step_run<kFormat, kRule>(constants, span, run, staged);
}

template <StateFormat kFormat, Rule kRule>
void step(const AdamNumbers& numbers, const AdamSpan& span) {
  if constexpr (has_codes(kFormat)) {
    step_in_codes<kFormat, kRule>(numbers, span);
  } else {
    step_in_floats<kFormat, kRule>(numbers, span);
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

#endif  // MODICUM_KERNELS_CODES_INL_H_
