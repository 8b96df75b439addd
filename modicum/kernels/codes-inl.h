// One AdamW step over a span with moments in 8-bit codes. Internal to `kernels`; compiled once per
// target.
#if defined(MODICUM_KERNELS_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MODICUM_KERNELS_CODES_INL_H_
#undef MODICUM_KERNELS_CODES_INL_H_
#else
#define MODICUM_KERNELS_CODES_INL_H_
#endif

#include "modicum/kernels/adamw-inl.h"

HWY_BEFORE_NAMESPACE();
namespace modicum {
namespace HWY_NAMESPACE {

// A run is up to kRunBlocks complete blocks, or part of one block. It is stepped in three passes:
// the codes of a block depend on its largest moments, and a processor overlaps more iterations of
// short loop bodies than of a long one.
//
//   moments   gradient, old codes          -> new moments in fp32, staged; then their scales
//   masters   staged moments, old master   -> new master
//   codes     staged moments, scales       -> new codes
constexpr int64_t kRunBlocks = 4;
constexpr int64_t kRunElements = kRunBlocks * kScaleBlock;

// Factors for encoding one moment, by block of the run.
struct MomentBlocks {
  float per[kRunBlocks];       // per_value
  float per_step[kRunBlocks];  // least_per_step; only for roots
};

// The moments of a run in fp32. If two vectors are updated as a pair, the elements with even
// indices come first.
struct Staged {
  alignas(64) float exp_avg[kRunElements];
  alignas(64) float root[kRunElements];      // of exp_avg_sq
  alignas(64) float max_root[kRunElements];  // of max_exp_avg_sq
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

// Random words from element k of the run on.
template <class D>
HWY_INLINE Words<D> random_words(D d, const Run& run, int64_t k) {
  const uint32_t* keys = run.keys[k / kScaleBlock].word;
  return random_words(d, keys, run.in_block + k % kScaleBlock);
}
template <class D>
HWY_INLINE Pair<Words<D>> random_word_pair(D d, const Run& run, int64_t k) {
  const uint32_t* keys = run.keys[k / kScaleBlock].word;
  return random_word_pair(d, keys, run.in_block + k % kScaleBlock);
}

// ---- the first pass

template <StateFormat kFormat, Rule kRule>
struct Moments {
  static constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  Constants c;
  AdamSpan span;
  const Run* run;
  Staged* staged;
  int64_t begin = run->begin;

  template <class D>
  struct Old {
    Floats<D> g, m, v, most;
  };
  // The new moments of a vector, from element k on.
  template <class D>
  HWY_INLINE void stage(D d, const Old<D>& old, int64_t k) const {
    const Floats<D> m = next_exp_avg<kRule>(d, c, old.g, old.m);
    const Floats<D> v = next_exp_avg_sq<kRule>(d, c, old.g, old.v);
    hn::StoreU(m, d, staged->exp_avg + k);
    hn::StoreU(hn::Sqrt(v), d, staged->root + k);
    if constexpr (kAmsgrad) hn::StoreU(hn::Sqrt(hn::Max(v, old.most)), d, staged->max_root + k);
  }
  float scale_at(const float* scales, int64_t k) const {
    return scales[run->scale + k / kScaleBlock];
  }
  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const int64_t i = begin + k;
    Old<D> old;
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
    stage(d, Old<D>{g.even, m.even, v.even, most.even}, k);
    stage(d, Old<D>{g.odd, m.odd, v.odd, most.odd}, k + static_cast<int64_t>(hn::Lanes(d)));
  }
};

// Sets the scales of a run; returns false if a moment exceeds kMostCoded or is NaN.
template <bool kAmsgrad>
HWY_INLINE bool set_scales(const AdamSpan& span, const Run& run, Staged& staged) {
  bool fits = true;
  run.by_block([&](int64_t b, int64_t k, int64_t n) {
    const float scale = largest(staged.exp_avg + k, n);
    span.exp_avg_scale[run.scale + b] = scale;
    staged.of_exp_avg.per[b] = per_value<kSignedPlaces>(scale);
    fits = fits && scale <= kMostCoded;
    const auto set = [&](const float* roots, float* scales, MomentBlocks& of) {
      const float root = largest(roots + k, n);
      scales[run.scale + b] = root;
      of.per[b] = per_value<kRootPlaces>(root);
      of.per_step[b] = least_per_step(scale, root);
      fits = fits && root <= kMostCoded;
    };
    set(staged.root, span.exp_avg_sq_scale, staged.of_root);
    if constexpr (kAmsgrad) set(staged.max_root, span.max_exp_avg_sq_scale, staged.of_max_root);
  });
  return fits;
}

// ---- the second pass

template <StateFormat kFormat, Rule kRule>
struct Masters {
  Constants c;
  AdamSpan span;
  const Run* run;
  Staged* staged;
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
    const Words<D> random = random_words(d, *run, k);
    hn::StoreU(random, du, staged->random + k);
    store_master<kFormat>(d, p, random, span, i);
    store_out(d, p, span, i);
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const hn::Rebind<uint32_t, D> du;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto p = load_master_pair<kFormat>(d, span.master, span.master_low, begin + k);
    const auto random = random_word_pair(d, *run, k);
    hn::StoreU(random.even, du, staged->random + k);
    hn::StoreU(random.odd, du, staged->random + k + lanes);
    const Pair<Floats<D>> now{next(d, p.even, k), next(d, p.odd, k + lanes)};
    store_master_pair<kFormat>(d, now, random, span, begin + k);
  }
};

// ---- the third pass, block by block

template <bool kAmsgrad>
struct Codes {
  struct Root {
    float per;       // per_value
    float per_step;  // least_per_step
  };
  AdamSpan span;
  const Staged* staged;
  int64_t begin;  // begin of the run in the span
  float per;      // per_value of exp_avg
  Root exp_avg_sq, max_exp_avg_sq;

  // Code words of a vector.
  template <class D>
  struct Of {
    Words<D> exp_avg, exp_avg_sq, max_exp_avg_sq;
  };
  // `z`: the rounded offset of exp_avg.
  template <class D>
  HWY_INLINE Words<D> root_codes(D d, const Root& of, Floats<D> root, Words<D> z,
                                 Words<D> random) const {
    const Floats<D> offset = hn::Max(offset_of(d, root, of.per), least_of(d, z, of.per_step));
    return root_code(d, rounded<kRootPlaces>(d, offset, root_random(d, random)), root);
  }
  template <class D>
  HWY_INLINE Of<D> codes(D d, int64_t k) const {
    const Words<D> random = hn::LoadU(hn::Rebind<uint32_t, D>(), staged->random + k);
    const Floats<D> m = hn::LoadU(d, staged->exp_avg + k);
    const Floats<D> offset = offset_of(d, hn::Abs(m), per);
    const Words<D> z = rounded<kSignedPlaces>(d, offset, signed_random(d, random));
    const Floats<D> root = hn::LoadU(d, staged->root + k);
    Of<D> of{signed_code(d, z, m), root_codes(d, exp_avg_sq, root, z, random), z};
    if constexpr (kAmsgrad) {
      const Floats<D> most = hn::LoadU(d, staged->max_root + k);
      of.max_exp_avg_sq = root_codes(d, max_exp_avg_sq, most, z, random);
    }
    return of;
  }
  template <class D>
  HWY_INLINE void operator()(D d, int64_t k) const {
    const int64_t i = begin + k;
    const Of<D> of = codes(d, k);
    store_codes(d, of.exp_avg, span.exp_avg, i);
    store_codes(d, of.exp_avg_sq, span.exp_avg_sq, i);
    if constexpr (kAmsgrad) store_codes(d, of.max_exp_avg_sq, span.max_exp_avg_sq, i);
  }
  template <class D>
  HWY_INLINE void pair(D d, int64_t k) const {
    const int64_t i = begin + k;
    const Of<D> even = codes(d, k);
    const Of<D> odd = codes(d, k + static_cast<int64_t>(hn::Lanes(d)));
    store_code_pair(d, even.exp_avg, odd.exp_avg, span.exp_avg, i);
    store_code_pair(d, even.exp_avg_sq, odd.exp_avg_sq, span.exp_avg_sq, i);
    if constexpr (kAmsgrad) {
      store_code_pair(d, even.max_exp_avg_sq, odd.max_exp_avg_sq, span.max_exp_avg_sq, i);
    }
  }
};

// ---- a step

template <StateFormat kFormat, class Pass>
HWY_INLINE void cover(const Pass& pass, int64_t begin, int64_t end) {
  int64_t k = begin;
  if constexpr (has_pairs(kFormat)) {
    if (pairs_of(pass.span)) k = for_pairs(pass, begin, end);
  }
  for_lanes(pass, k, end);
}

template <StateFormat kFormat, Rule kRule>
HWY_INLINE void step_run(const Constants& c, const AdamSpan& span, const Run& run, Staged& staged) {
  constexpr bool kAmsgrad = kRule == Rule::torch_amsgrad;
  cover<kFormat>(Moments<kFormat, kRule>{c, span, &run, &staged}, 0, run.n);
  const bool fits = set_scales<kAmsgrad>(span, run, staged);
  cover<kFormat>(Masters<kFormat, kRule>{c, span, &run, &staged}, 0, run.n);
  if (!fits) {
    clamp_to_codes(staged.exp_avg, run.n);
    clamp_to_codes(staged.root, run.n);
    if constexpr (kAmsgrad) clamp_to_codes(staged.max_root, run.n);
    set_scales<kAmsgrad>(span, run, staged);
  }
  run.by_block([&](int64_t b, int64_t k, int64_t n) {
    const auto root = [&](const MomentBlocks& of) {
      return typename Codes<kAmsgrad>::Root{of.per[b], of.per_step[b]};
    };
    const Codes<kAmsgrad> codes{
        span,
        &staged,
        run.begin,
        staged.of_exp_avg.per[b],
        root(staged.of_root),
        root(staged.of_max_root),
    };
    cover<kFormat>(codes, k, k + n);
  });
}

template <StateFormat kFormat, Rule kRule>
void step_in_codes(const AdamNumbers& numbers, const AdamSpan& span) {
  const Constants constants = constants_of(numbers);
  Pieces<kFormat> pieces(span, stream_key(numbers.seed, numbers.step, span.parameter));
  Staged staged;
  Piece piece;
  for (bool is_left = pieces.next(piece); is_left;) {
    Run run{piece.begin, 0, piece.scale, piece.begin + piece.to_block, {}};
    bool is_whole = true;
    for (int64_t b = 0; is_left && is_whole && b < kRunBlocks; ++b) {
      is_whole = piece.end - piece.begin == kScaleBlock;
      if (b > 0 && !is_whole) break;
      run.n += piece.end - piece.begin;
      run.keys[b] = piece.keys;
      is_left = pieces.next(piece);
    }
    step_run<kFormat, kRule>(constants, span, run, staged);
  }
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
