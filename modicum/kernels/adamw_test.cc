#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <random>
#include <string>

#include "modicum/base/base.h"
#include "modicum/kernels/adamw_reference_double.h"
#include "modicum/kernels/adamw_torch_double.h"
#include "modicum/kernels/held_span_double.h"

namespace modicum {
namespace {

// The digest that record_adamw.py computes of an array of 32-bit words.
uint64_t digest_of(const std::vector<std::byte>& bytes) {
  uint64_t digest = 0xcbf29ce484222325U;
  for (size_t i = 0; i < bytes.size(); i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i, sizeof word);
    digest = (digest ^ word) * 0x100000001b3U;
  }
  return digest;
}

// Makes the recorded steps and compares digests of the state with torch's.
void expect_torch(const TorchRun& run) {
  HeldSpan state(StateFormat::fp32, 0, kTorchCount);
  const std::vector<float> start = spread_values(0, kTorchCount);
  std::memcpy(state.master.data(), start.data(), start.size() * sizeof(float));
  size_t row = 0;
  for (int64_t step = 1; step <= kTorchSteps.back(); ++step) {
    AdamNumbers numbers = adam_numbers(run.options, step, 0);
    numbers.unscale = run.unscale;
    numbers.clip = run.clip;
    state.set_grad(spread_values(step, kTorchCount));
    adamw(numbers, state.span());
    if (step != kTorchSteps[row]) continue;
    const TorchDigests& digests = run.after[row++];
    EXPECT_EQ(digest_of(state.master.bytes()), digests[0]) << "step " << step;
    EXPECT_EQ(digest_of(state.exp_avg.bytes()), digests[1]) << "step " << step;
    EXPECT_EQ(digest_of(state.exp_avg_sq.bytes()), digests[2]) << "step " << step;
    if (!run.options.amsgrad) continue;
    EXPECT_EQ(digest_of(state.max_exp_avg_sq.bytes()), digests[3]) << "step " << step;
  }
}

// Tolerates two ulps of the parameter or of its total update, whichever is larger.
void expect_near_in_one_step(float ours, float torchs, float before) {
  const float size = std::max(std::fabs(torchs), std::fabs(torchs - before));
  const float ulp = std::nextafter(size, 2 * size) - size;
  EXPECT_NEAR(ours, torchs, 2 * ulp);
}

// Makes the recorded steps and compares the first parameters with torch's, after step 1 and after
// the last step.
void expect_near_torch(const TorchRun& run) {
  HeldSpan state(StateFormat::fp32, 0, kTorchCount);
  const std::vector<float> start = spread_values(0, kTorchCount);
  std::memcpy(state.master.data(), start.data(), start.size() * sizeof(float));
  std::vector<float> p(kTorchCount);
  for (int64_t step = 1; step <= kTorchSteps.back(); ++step) {
    AdamNumbers numbers = adam_numbers(run.options, step, 0);
    numbers.unscale = run.unscale;
    numbers.clip = run.clip;
    state.set_grad(spread_values(step, kTorchCount));
    adamw(numbers, state.span());
    std::memcpy(p.data(), state.master.data(), p.size() * sizeof(float));
    for (size_t i = 0; step == 1 && i < run.after_first.size(); ++i) {
      expect_near_in_one_step(p[i], run.after_first[i], start[i]);
    }
  }
  for (size_t i = 0; i < run.after_last.size(); ++i) {
    const float size = std::max(std::fabs(p[i]), std::fabs(p[i] - start[i]));
    EXPECT_NEAR(p[i], run.after_last[i], 1e-6F * size);
  }
}

// Torch's own square roots are not always rounded to nearest, and differ between machines.
TEST(AdamW, IsCloseToTorchWithItsOwnSquareRoots) {
  for (size_t i = 0; i < kTorchRuns.size(); ++i) {
    SCOPED_TRACE("run " + std::to_string(i));
    expect_near_torch(kTorchRuns[i]);
  }
}

TEST(AdamW, EqualsTorchAfter1000Steps) {
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    for (size_t i = 0; i < kTorchRuns.size(); ++i) {
      SCOPED_TRACE(std::string(isa) + ", run " + std::to_string(i));
      expect_torch(kTorchRuns[i]);
    }
  }
  use_isa(isas().front());
}

// A case of a step: options, factors and dtypes.
struct StepCase {
  AdamSemantics semantics;
  bool decoupled, amsgrad, maximize, bias_correction;
  double beta1;
  float unscale, clip;
  DType grad;
  DType out;
  double beta2 = 0.999;
};
constexpr StepCase kStepCases[] = {
    {AdamSemantics::torch, true, false, false, true, 0.9, 1, 1, DType::bf16, DType::bf16},
    {AdamSemantics::torch, false, false, true, true, 0.4, 0.125F, 0.37F, DType::f16, DType::f16},
    {AdamSemantics::torch, true, true, false, false, 0.95, 1, 0.7F, DType::f32, DType::bf16},
    {AdamSemantics::deepspeed, true, false, false, true, 0.9, 1, 0.9F, DType::bf16, DType::f16},
    {AdamSemantics::deepspeed, false, false, false, false, 0.8, 0.5F, 1, DType::f32, DType::bf16},
};

AdamNumbers numbers_of(const StepCase& step_case, int64_t step) {
  AdamOptions options;
  options.semantics = step_case.semantics;
  options.beta1 = step_case.beta1;
  options.beta2 = step_case.beta2;
  options.decoupled = step_case.decoupled;
  options.amsgrad = step_case.amsgrad;
  options.maximize = step_case.maximize;
  options.bias_correction = step_case.bias_correction;
  AdamNumbers numbers = adam_numbers(options, step, 0xfeedbeefU);
  numbers.unscale = step_case.unscale;
  numbers.clip = step_case.clip;
  return numbers;
}

// Elements [first, first + n) of a parameter.
struct Elements {
  int64_t first = 0;
  int64_t n = 0;
  int64_t row = 0;      // AdamSpan::row
  bool has_out = true;  // AdamSpan::out
};

AdamSpan span_of(HeldSpan& state, const Elements& elements) {
  AdamSpan span = state.span();
  if (!elements.has_out) span.out = nullptr;
  return span;
}

// The state before step 1.
HeldSpan begun(StateFormat format, const StepCase& step_case, const Elements& elements) {
  HeldSpan state(format, elements.first, elements.n, 1, elements.row);
  state.grad_dtype = step_case.grad;
  state.out_dtype = step_case.out;
  import_state(numbers_of(step_case, 1), state.span(), StatePlane::master,
               spread_values(0, elements.n).data());
  return state;
}

using GradientsOf = std::vector<float> (*)(int64_t step, int64_t n);

// Expects that after `steps` steps the state has the reference's bits on every instruction set.
void expect_reference(StateFormat format, const StepCase& step_case, const Elements& elements,
                      int64_t steps, GradientsOf gradients = spread_values) {
  HeldSpan expected = begun(format, step_case, elements);
  std::vector<HeldSpan> states(isas().size(), expected);
  for (int64_t step = 1; step <= steps; ++step) {
    const std::vector<float> grad = gradients(step, elements.n);
    const AdamNumbers numbers = numbers_of(step_case, step);
    expected.set_grad(grad);
    reference_adamw(numbers, span_of(expected, elements));
    for (size_t i = 0; i < states.size(); ++i) {
      use_isa(isas()[i]);
      states[i].set_grad(grad);
      adamw(numbers, span_of(states[i], elements));
    }
  }
  for (size_t i = 0; i < states.size(); ++i) {
    EXPECT_TRUE(states[i] == expected)
        << isas()[i] << ", " << row_of(format).name << ", betas " << step_case.beta1 << " "
        << step_case.beta2 << ", clip " << step_case.clip << ", " << elements.n << " from "
        << elements.first << ", rows of " << elements.row;
  }
  use_isa(isas().front());
}

TEST(AdamW, EqualsTheReferenceAfter1000Steps) {
  for (const StateFormatRow& row : all_state_formats()) {
    for (const StepCase& step_case : kStepCases)
      expect_reference(row.format, step_case, {120, 45}, 1000);
  }
}

TEST(AdamW, EqualsTheReferenceAtAnyOffsetAndLength) {
  for (const StateFormatRow& row : all_state_formats()) {
    for (const int64_t first : {int64_t{0}, int64_t{5}, int64_t{127}, (int64_t{1} << 33) + 77}) {
      for (const int64_t n : {0, 1, 7, 128, 131, 400}) {
        for (const StepCase& step_case : kStepCases)
          expect_reference(row.format, step_case, {first, n}, 2);
      }
    }
  }
}

TEST(AdamW, EqualsTheReferenceInRows) {
  for (const StateFormatRow& row : all_state_formats()) {
    for (const int64_t row_size : {100, 128, 129, 300, 1000}) {
      for (const int64_t first : {int64_t{0}, int64_t{250}, (int64_t{1} << 33) + 77}) {
        expect_reference(row.format, kStepCases[0], {first, 700, row_size}, 2);
      }
    }
  }
}

// Zeros, whose roots are 0, and in step 2 a gradient whose root exceeds 2^63, the largest value of
// a code.
std::vector<float> extreme_values(int64_t step, int64_t n) {
  std::vector<float> values = spread_values(step, n);
  for (size_t i = 3; i < values.size(); i += 7) values[i] = 0;
  if (step == 2) values[static_cast<size_t>(n) / 2] = 1e30F;
  return values;
}

// bf16 gradients without `out` are stepped two vectors at a time, and 8-bit moments in runs of up
// to four blocks. With beta2 near 1, roots are small, and their least offsets (see least_root)
// exceed the offset of the largest code.
TEST(AdamW, EqualsTheReferenceInPairsAndRuns) {
  constexpr StepCase kPaired[] = {
      {AdamSemantics::torch, true, false, false, true, 0.9, 1, 0.9F, DType::bf16, DType::bf16},
      {AdamSemantics::torch, true, true, false, true, 0.9, 0.3F, 0.9F, DType::bf16, DType::bf16,
       1 - 1e-7},
      {AdamSemantics::deepspeed, false, false, false, true, 0.9, 0.5F, 1, DType::bf16, DType::bf16,
       1 - 1e-7},
  };
  for (const StateFormatRow& row : all_state_formats()) {
    for (const StepCase& step_case : kPaired) {
      for (const int64_t n : {31, 168, 512, 1250}) {
        expect_reference(row.format, step_case, {128, n, 0, false}, 4, extreme_values);
      }
      expect_reference(row.format, step_case, {1000, 2600, 1000, false}, 4, extreme_values);
    }
  }
}

// Rows of 300 elements end with a short block. Each call steps one row.
TEST(AdamW, IsBitEqualForAnyDivisionIntoRows) {
  for (const StateFormatRow& row : all_state_formats()) {
    constexpr int64_t kRow = 300;
    HeldSpan whole = begun(row.format, kStepCases[0], {2 * kRow, 4 * kRow, kRow});
    HeldSpan cut = whole;
    for (int64_t step = 1; step <= 3; ++step) {
      const AdamNumbers numbers = numbers_of(kStepCases[0], step);
      for (HeldSpan* state : {&whole, &cut}) state->set_grad(spread_values(step, 4 * kRow));
      adamw(numbers, whole.span());
      for (int64_t k = 3; k >= 0; --k) adamw(numbers, cut.part(k * kRow, kRow));
    }
    EXPECT_TRUE(whole == cut) << row.name;
  }
}

// Divides at multiples of kScaleBlock for 8-bit moments, else anywhere.
TEST(AdamW, IsBitEqualForAnyDivisionIntoCalls) {
  for (const StateFormatRow& row : all_state_formats()) {
    const int64_t first = 3 * kScaleBlock;
    HeldSpan whole = begun(row.format, kStepCases[0], {first, 1000});
    HeldSpan cut = whole;
    for (int64_t step = 1; step <= 3; ++step) {
      const AdamNumbers numbers = numbers_of(kStepCases[0], step);
      for (HeldSpan* state : {&whole, &cut}) state->set_grad(spread_values(step, 1000));
      adamw(numbers, whole.span());
      const std::vector<int64_t> cuts = row.has_scales()
                                            ? std::vector<int64_t>{0, 128, 512, 640, 1000}
                                            : std::vector<int64_t>{0, 1, 130, 131, 700, 1000};
      for (size_t k = cuts.size() - 1; k > 0; --k) {
        adamw(numbers, cut.part(cuts[k - 1], cuts[k] - cuts[k - 1]));
      }
    }
    EXPECT_TRUE(whole == cut) << row.name;
  }
}

// The gradients are 0 and nothing decays: the parameter does not change, and `out` must be its
// cast.
TEST(AdamW, OutIsRoundedAsByCast) {
  constexpr int64_t kN = 1 << 17;
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    for (const DType out : {DType::bf16, DType::f16}) {
      HeldSpan state(StateFormat::fp32, 0, kN);
      state.out_dtype = out;
      for (int64_t i = 0; i < kN; ++i) {
        auto bits = static_cast<uint32_t>(i) << 15;  // ties of bf16 and all binades
        if ((bits & 0x7f800000U) == 0x7f800000U) bits = 0x387fffffU;
        std::memcpy(state.master.data() + 4 * i, &bits, sizeof bits);
      }
      const std::vector<std::byte> before = state.master.bytes();
      AdamNumbers numbers;
      numbers.decay = 1;
      adamw(numbers, state.span());
      ASSERT_EQ(state.master.bytes(), before);
      HeldPlane expected(kN * 2, 0);
      cast(before.data(), DType::f32, expected.data(), out, kN);
      EXPECT_EQ(state.out.bytes(), expected.bytes()) << isa;
    }
  }
  use_isa(isas().front());
}

// lr * weight_decay is 1: torch multiplies the parameter by 0.
TEST(AdamW, DecayOfAllErasesTheParameter) {
  AdamOptions options;
  options.lr = 10;
  options.weight_decay = 0.1;
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    for (const StateFormatRow& row : all_state_formats()) {
      HeldSpan state = begun(row.format, kStepCases[0], {0, 500});
      HeldSpan expected = state;
      for (HeldSpan* span : {&state, &expected}) span->set_grad(spread_values(1, 500));
      const AdamNumbers numbers = adam_numbers(options, 1, 0);
      ASSERT_EQ(numbers.decay, 0);
      adamw(numbers, state.span());
      reference_adamw(numbers, expected.span());
      EXPECT_TRUE(state == expected) << row.name << " " << isa;
    }
  }
  use_isa(isas().front());
}

// The expected values were computed with numpy's float32 and a running product.
TEST(AdamNumbers, DeepSpeedsAreRoundedToFp32AtEveryStep) {
  struct ExpectedNumbers {
    double beta1, beta2;
    int64_t step;
    float step_size, bias2, one_minus_beta2;
  };
  constexpr ExpectedNumbers kKnown[] = {
      {0.9, 0.999, 1, -0x1.893746p-9F, 0x1.f9f7bap+4F, 0x1.0624p-10F},
      {0.9, 0.999, 10, -0x1.e2f9e4p-12F, 0x1.40b8fep+3F, 0x1.0624p-10F},
      {0.9, 0.95, 1000, -0x1.3a92a4p-12F, 1.0F, 0x1.9999ap-5F},
      {0.8, 0.9999, 5000, -0x1.3a92a4p-12F, 0x1.98154p+0F, 0x1.a38p-14F},
  };
  for (const ExpectedNumbers& known : kKnown) {
    AdamOptions options;
    options.semantics = AdamSemantics::deepspeed;
    options.lr = 3e-4;
    options.weight_decay = 0.1;
    options.beta1 = known.beta1;
    options.beta2 = known.beta2;
    const AdamNumbers numbers = adam_numbers(options, known.step, 0);
    EXPECT_EQ(numbers.step_size, known.step_size) << known.step;
    EXPECT_EQ(numbers.bias2, known.bias2) << known.step;
    EXPECT_EQ(numbers.one_minus_beta2, known.one_minus_beta2);
    EXPECT_EQ(numbers.decay, -0x1.f75106p-16F);
  }
}

float plain_product(float base, int64_t factors) {
  float product = 1;
  for (int64_t i = 0; i < factors; ++i) product *= base;
  return product;
}

// Jumps forward, back, to another base, and beyond the step after which a power stays constant.
TEST(RunningPower, EqualsThePlainProductAfterAnyJump) {
  constexpr float kBases[] = {0.9F, 0.999F, 0.9999F, 0.0F};
  std::mt19937 random(7);  // NOLINT(cert-msc51-cpp): the same jumps in every run
  RunningPower power;
  int64_t step = 0;
  for (int jump = 0; jump < 500; ++jump) {
    const float base = kBases[random() % (jump < 250 ? 1 : 4)];
    const bool leaps = random() % 8 == 0;
    step = leaps ? random() % 150'000 : step + random() % 3;
    ASSERT_EQ(power.at(base, step), plain_product(base, step)) << base << "^" << step;
  }
}

// The powers of this base change in every step. 1,000 steps after the 2,000,000th must take less
// CPU time than two powers computed from the beginning.
TEST(RunningPower, ContinuesFromTheLastStep) {
  const float base = std::nextafter(1.0F, 0.0F);
  const int64_t first = 2'000'000;
  RunningPower power;
  const std::clock_t begin = std::clock();
  float last = power.at(base, first);
  const std::clock_t middle = std::clock();
  for (int64_t step = first + 1; step <= first + 1000; ++step) {
    const float next = power.at(base, step);
    ASSERT_LT(next, last);
    last = next;
  }
  EXPECT_LT(std::clock() - middle, 2 * (middle - begin));
}

TEST(AdamNumbers, DoNotDependOnWhereTheirPowersContinueFrom) {
  AdamOptions options;
  options.semantics = AdamSemantics::deepspeed;
  BetaPowers powers;
  for (const int64_t step : {1, 2, 3, 50'000, 50'001, 7}) {
    if (step == 50'001) options.beta2 = 0.99;
    const AdamNumbers continued = adam_numbers(options, step, 0, powers);
    const AdamNumbers fresh = adam_numbers(options, step, 0);
    EXPECT_EQ(continued.step_size, fresh.step_size) << step;
    EXPECT_EQ(continued.bias2, fresh.bias2) << step;
  }
}

TEST(AdamNumbers, TorchCountsStepsUpTo2To24) {
  AdamOptions options;
  options.beta2 = 1 - 1e-8;
  const int64_t most = int64_t{1} << 24;
  EXPECT_NE(adam_numbers(options, most, 0).bias2, adam_numbers(options, most - 1000, 0).bias2);
  EXPECT_EQ(adam_numbers(options, most, 0).bias2, adam_numbers(options, 3 * most, 0).bias2);
}

TEST(Isa, UseIsaSelectsTheRequestedOne) {
  ASSERT_FALSE(isas().empty());
  EXPECT_EQ(isa(), isas().front());
  for (const std::string_view name : isas()) {
    use_isa(name);
    EXPECT_EQ(isa(), name);
  }
  for (const std::string_view name : isas_not_run()) EXPECT_THROW(use_isa(name), Error);
  EXPECT_EQ(isa(), isas().back());
  EXPECT_THROW(use_isa("none"), Error);
  use_isa(isas().front());
}

// ---- random bits

// Correlation of two sequences of words, read as numbers in [-1/2, 1/2), in standard deviations.
double correlation(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] * 0x1p-32 - 0.5) * (b[i] * 0x1p-32 - 0.5);
  return 12 * sum / std::sqrt(static_cast<double>(a.size()));
}

struct Stream {
  uint64_t seed = 1;
  int64_t step = 1;
  uint64_t parameter = 1;
  int64_t first = 0;
};

std::vector<uint32_t> words(const Stream& stream, int shift = 0) {
  std::vector<uint32_t> kept;
  for (int64_t i = 0; i < 100'000; ++i) {
    kept.push_back(reference_word(stream.seed, stream.step, stream.parameter, stream.first + i)
                   << shift);
  }
  return kept;
}

TEST(RandomBits, StreamsAreUncorrelated) {
  const int64_t far = int64_t{1} << 32;
  const std::vector<std::vector<uint32_t>> streams = {
      words({}),           words({}, 16),           words({}, 24),
      words({.first = 1}), words({.first = 128}),   words({.first = far}),
      words({.step = 2}),  words({.parameter = 2}), words({.seed = 2}),
  };
  for (size_t i = 0; i < streams.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      EXPECT_LT(std::fabs(correlation(streams[i], streams[k])), 4.5) << i << ", " << k;
    }
  }
}

TEST(RandomBits, EveryBitIsSetHalfOfTheTime) {
  const std::vector<uint32_t> all = words({});
  for (int bit = 0; bit < 32; ++bit) {
    double sum = 0;
    for (const uint32_t word : all) sum += (word >> bit & 1U) != 0 ? 1 : -1;
    EXPECT_LT(std::fabs(sum), 4.5 * std::sqrt(static_cast<double>(all.size()))) << bit;
  }
}

}  // namespace
}  // namespace modicum
