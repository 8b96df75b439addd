// The guarantees of the state formats: exactness, unbiased rounding, and bounds of rounded moments.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <thread>

#include "modicum/base/base.h"
#include "modicum/kernels/adamw_reference_double.h"
#include "modicum/kernels/held_span_double.h"

namespace modicum {
namespace {

constexpr StateFormat kLowBit[] = {StateFormat::bf16_moments, StateFormat::int8_moments,
                                   StateFormat::int8_moments_24};

std::string name_of(StateFormat format) { return std::string(row_of(format).name); }

std::vector<float> exported(HeldSpan& state, StatePlane plane) {
  std::vector<float> values(static_cast<size_t>(state.n));
  export_state(state.span(), plane, values.data());
  return values;
}

// ---- split masters

constexpr uint32_t kPatterns = 0x1000;  // per call; few, so that they stay in the cache

// Whether the kPatterns fp32 patterns from `first` on come back from an import into two halves.
bool patterns_are_exact(uint32_t first, HeldSpan& state, std::vector<float>& values,
                        std::vector<float>& back) {
  for (uint32_t i = 0; i < kPatterns; ++i) values[i] = std::bit_cast<float>(first + i);
  import_state({}, state.span(), StatePlane::master, values.data());
  export_state(state.span(), StatePlane::master, back.data());
  return std::memcmp(values.data(), back.data(), values.size() * sizeof(float)) == 0;
}

// The number of calls with a wrong pattern, of every `step`-th call from the `begin`-th on.
int64_t wrong_calls(uint32_t begin, uint32_t step) {
  HeldSpan state(StateFormat::fp32_split, 0, kPatterns);
  std::vector<float> values(kPatterns);
  std::vector<float> back(kPatterns);
  int64_t wrong = 0;
  for (uint64_t k = begin; k * kPatterns < uint64_t{1} << 32; k += step) {
    const auto first = static_cast<uint32_t>(k * kPatterns);
    const bool bf16_can_hold = (first & 0x7fffffffU) < 0x7f7f8000U;
    if (bf16_can_hold && !patterns_are_exact(first, state, values, back)) ++wrong;
  }
  return wrong;
}

TEST(StateFormat, ASplitMasterIsExactForEveryFloatInTheRangeOfBf16) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint32_t kThreads = 2, kStep = 2 * 97;  // sanitizers take minutes for all
#else
  constexpr uint32_t kThreads = 2, kStep = 2;
#endif
  int64_t wrong[kThreads] = {};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&wrong, t] { wrong[t] = wrong_calls(t, kStep); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong[0] + wrong[1], 0);
}

// ---- an upper half overwritten by the caller, with a stale lower half

constexpr StateFormat kSplit[] = {StateFormat::fp32_split, StateFormat::bf16_moments,
                                  StateFormat::int8_moments, StateFormat::int8_moments_24};
constexpr int64_t kUppers = 0x10000;

// All upper halves, each with the lower half `lower` (its upper 8 bits if the format keeps 8).
HeldSpan written_over(StateFormat format, int16_t lower) {
  HeldSpan state(format, 0, kUppers);
  const int64_t width = bits_per_element(row_of(format).master_low) / 8;
  const int16_t kept = width == 1 ? static_cast<int16_t>(lower >> 8) : lower;
  for (int64_t upper = 0; upper < kUppers; ++upper) {
    std::memcpy(state.master.data() + 2 * upper, &upper, 2);
    std::memcpy(state.master_low.data() + width * upper, &kept, static_cast<size_t>(width));
  }
  return state;
}

// masters[i] was joined from the upper half i and some lower half. Counts the wrong masters: if the
// upper half is finite, the master must be finite and round to it; if it is an infinity, the master
// must equal it; if it is a NaN, the master must be a NaN.
int64_t not_of_their_class(const std::vector<float>& masters) {
  int64_t wrong = 0;
  for (uint32_t upper = 0; upper < kUppers; ++upper) {
    const auto written = std::bit_cast<float>(upper << 16);
    const float master = masters[upper];
    const auto rounded = (std::bit_cast<uint32_t>(master) + 0x8000U) >> 16;
    if (std::isfinite(written)) wrong += std::isfinite(master) && rounded == upper ? 0 : 1;
    if (std::isinf(written)) wrong += master == written ? 0 : 1;
    if (std::isnan(written)) wrong += std::isnan(master) ? 0 : 1;
  }
  return wrong;
}

TEST(StateFormat, AnOverwrittenUpperHalfWinsOverAnyLowerHalf) {
  for (const StateFormat format : kSplit) {
    for (const int16_t lower : {-32768, -32767, -257, -256, -1, 0, 1, 255, 256, 32767}) {
      HeldSpan state = written_over(format, lower);
      for (const std::string_view isa : isas()) {
        use_isa(isa);
        EXPECT_EQ(not_of_their_class(exported(state, StatePlane::master)), 0)
            << name_of(format) << ", lower half " << lower << ", " << isa;
      }
    }
  }
  use_isa(isas().front());
}

// Sets half of the elements to zero after step 3; returns how many of them are zero at the end.
int64_t zeros_left(StateFormat format, bool out, FunctionRef<void(AdamSpan)> step_once) {
  const int64_t n = 4096;
  HeldSpan state(format, 0, n);
  import_state({}, state.span(), StatePlane::master, spread_values(9, n).data());
  const int64_t width = bits_per_element(row_of(format).master) / 8;
  for (int64_t step = 1; step <= 103; ++step) {
    state.set_grad(spread_values(step, n));
    AdamSpan span = state.span();
    if (!out) span.out = nullptr;
    step_once(span);
    if (step == 3) std::memset(state.master.data(), 0, static_cast<size_t>(n / 2 * width));
  }
  // Compares the bits that training reads, without the sign.
  int64_t zeros = 0;
  for (int64_t i = 0; i < n / 2; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, state.master.data() + width * i, static_cast<size_t>(width));
    zeros += (bits & (width == 2 ? 0x7fffU : 0x7fffffffU)) == 0 ? 1 : 0;
  }
  return zeros;
}

TEST(StateFormat, ParametersSetToZeroContinueFromZero) {
  const AdamNumbers numbers = adam_numbers({}, 50, 7);
  for (const StateFormatRow& row : all_state_formats()) {
    for (const bool out : {true, false}) {  // false: bf16 moments are stepped in pairs of vectors
      for (const std::string_view isa : isas()) {
        use_isa(isa);
        const auto step_once = [&](const AdamSpan& span) { adamw(numbers, span); };
        EXPECT_LE(zeros_left(row.format, out, step_once), 20) << row.name << ", " << isa;
      }
      use_isa(isas().front());
      const auto reference = [&](const AdamSpan& span) { reference_adamw(numbers, span); };
      EXPECT_LE(zeros_left(row.format, out, reference), 20) << row.name << ", reference";
    }
  }
}

TEST(StateFormat, ImportedNansStayNans) {
  std::vector<float> nans;
  for (const uint32_t bits : {0xffffffffU, 0x7fffffffU, 0x7fff8000U, 0x7f800001U, 0x7fc00000U}) {
    nans.insert(nans.end(), 9, std::bit_cast<float>(bits));
  }
  const auto n = static_cast<int64_t>(nans.size());
  for (const StateFormatRow& row : all_state_formats()) {
    for (const StatePlane plane : {StatePlane::master, StatePlane::exp_avg}) {
      if (row.has_scales() && plane != StatePlane::master) continue;  // codes represent no NaN
      HeldSpan state(row.format, 0, n);
      import_state(adam_numbers({}, 1, 3), state.span(), plane, nans.data());
      for (const float back : exported(state, plane)) EXPECT_TRUE(std::isnan(back)) << row.name;
    }
  }
}

// ---- precision of the planes

TEST(StateFormat, AnExactFormatExportsTheImportedValues) {
  const std::vector<float> values = spread_values(3, 777);
  for (const StateFormat format : {StateFormat::fp32, StateFormat::fp32_split}) {
    for (const StatePlane plane : {StatePlane::master, StatePlane::exp_avg, StatePlane::exp_avg_sq,
                                   StatePlane::max_exp_avg_sq}) {
      HeldSpan state(format, 11, 777, 3);
      import_state({}, state.span(), plane, values.data());
      EXPECT_EQ(exported(state, plane), values) << name_of(format);
    }
  }
}

// A short master has 24 bits: the lower half keeps 8.
TEST(StateFormat, AShortMasterIsWithinTwoToTheMinusFifteen) {
  const std::vector<float> values = spread_values(3, 5000);
  HeldSpan state(StateFormat::int8_moments_24, 11, 5000);
  import_state({}, state.span(), StatePlane::master, values.data());
  const std::vector<float> back = exported(state, StatePlane::master);
  for (size_t i = 0; i < back.size(); ++i) {
    ASSERT_LT(std::fabs(back[i] - values[i]), std::fabs(values[i]) * 0x1p-15F);
  }
}

// Half the distance between the codes around x, in units of the scale. Offsets are 2 + x * range,
// with the given number of codes in each doubling.
float half_step(float x, float range, float codes_of_segment) {
  return std::exp2(std::floor(std::log2(2 + x * range))) / codes_of_segment / range / 2;
}

TEST(StateFormat, ImportedMomentsHaveTheNearestCode) {
  const int64_t n = 5 * kScaleBlock;
  const std::vector<float> values = spread_values(3, n);
  std::vector<float> squares_of(values);
  for (float& value : squares_of) value *= value;
  HeldSpan state(StateFormat::int8_moments, 0, n);
  import_state({}, state.span(), StatePlane::exp_avg, values.data());
  import_state({}, state.span(), StatePlane::exp_avg_sq, squares_of.data());
  const std::vector<float> m = exported(state, StatePlane::exp_avg);
  const std::vector<float> v = exported(state, StatePlane::exp_avg_sq);
  for (size_t i = 0; i < m.size(); ++i) {
    const float scale = state.exp_avg_scale[i / kScaleBlock];
    const float root_scale = state.exp_avg_sq_scale[i / kScaleBlock];
    const float value = std::fabs(values[i]);
    ASSERT_LE(std::fabs(m[i] - values[i]), half_step(value / scale, 494, 16) * scale * 1.001F);
    const float least = root_scale / 16 / 502;  // code 1, since only 0 has code 0
    ASSERT_LE(std::fabs(std::sqrt(v[i]) - value),
              std::max(least, half_step(value / root_scale, 502, 32) * root_scale) * 1.001F);
    ASSERT_TRUE(v[i] > 0 || values[i] == 0);
  }
  // What was exported is imported again without loss.
  HeldSpan again(StateFormat::int8_moments, 0, n);
  import_state({}, again.span(), StatePlane::exp_avg, m.data());
  import_state({}, again.span(), StatePlane::exp_avg_sq, v.data());
  EXPECT_TRUE(again == state);
  EXPECT_EQ(exported(again, StatePlane::exp_avg), m);
  EXPECT_EQ(exported(again, StatePlane::exp_avg_sq), v);
}

TEST(StateFormat, BlocksOfZerosAndOfDenormalsAreRepresented) {
  for (const float size : {0.0F, 0x1p-149F, 0x1p-127F, 0x1p60F}) {
    HeldSpan state(StateFormat::int8_moments, 0, kScaleBlock);
    const std::vector<float> values(kScaleBlock, size);
    for (const StatePlane plane : {StatePlane::exp_avg, StatePlane::exp_avg_sq}) {
      import_state({}, state.span(), plane, values.data());
      // Scales below 2^-100 do not reach the largest code.
      const float tolerance = size < 0x1p-100F ? size : size * 1e-6F;
      for (const float back : exported(state, plane)) ASSERT_NEAR(back, size, tolerance);
    }
  }
}

// A value whose square overflows leaves its block's scale finite and the block's other elements
// unchanged.
TEST(StateFormat, AHugeGradientAffectsOnlyItsElement) {
  const int64_t n = 2 * kScaleBlock;
  for (const StateFormatRow& row : all_state_formats()) {
    // 1.5e20 exceeds the codes of exp_avg, 4e20 also those of the root; from 6e20 on, exp_avg_sq
    // is infinite.
    for (const float huge : {1.5e20F, 4e20F, 6e20F, 2e38F, 0x1.fffffep127F}) {
      for (const std::string_view isa : isas()) {
        use_isa(isa);
        HeldSpan state(row.format, 0, n);
        state.grad_dtype = DType::f32;
        HeldSpan expected = state;
        for (int64_t step = 1; step <= 20; ++step) {
          std::vector<float> grad(static_cast<size_t>(n));
          grad[5] = step == 2 ? huge : 1;
          for (HeldSpan* each : {&state, &expected}) each->set_grad(grad);
          const AdamNumbers numbers = adam_numbers({.amsgrad = true}, step, 7);
          adamw(numbers, state.span());
          reference_adamw(numbers, expected.span());
        }
        EXPECT_TRUE(state == expected) << row.name << ", " << isa;
        const std::vector<float> masters = exported(state, StatePlane::master);
        for (size_t i = 0; i < masters.size(); ++i) {
          ASSERT_LE(std::fabs(masters[i]), i == 5 ? 0.1F : 0.0F) << row.name << ", element " << i;
        }
        if (!row.has_scales()) continue;
        for (const StatePlane plane : {StatePlane::exp_avg, StatePlane::exp_avg_sq}) {
          for (const float value : exported(state, plane)) ASSERT_TRUE(std::isfinite(value));
        }
      }
    }
  }
  use_isa(isas().front());
}

TEST(StateFormat, PlanesAreTheSameFromEveryInstructionSetAndCut) {
  const int64_t n = 400;
  const std::vector<float> values = spread_values(3, n);
  for (const StateFormat format : kLowBit) {
    for (const StatePlane plane : {StatePlane::master, StatePlane::exp_avg}) {
      HeldSpan whole(format, 0, n);
      import_state(adam_numbers({}, 4, 5), whole.span(), plane, values.data());
      for (const std::string_view isa : isas()) {
        use_isa(isa);
        HeldSpan cut(format, 0, n);
        for (const auto& [begin, count] : {std::pair{0, 256}, {256, 144}}) {
          import_state(adam_numbers({}, 4, 5), cut.part(begin, count), plane,
                       values.data() + begin);
        }
        EXPECT_TRUE(whole == cut) << isa << ", " << name_of(format);
        EXPECT_EQ(exported(whole, plane), exported(cut, plane)) << isa;
      }
      use_isa(isas().front());
    }
  }
}

// ---- stochastic rounding is unbiased

// A step with beta1 = beta2 = 0, which stores the gradients and their squares.
HeldSpan stored(StateFormat format, const std::vector<float>& gradients) {
  HeldSpan state(format, 0, static_cast<int64_t>(gradients.size()));
  state.grad_dtype = DType::f32;
  state.set_grad(gradients);
  AdamOptions options;
  options.lr = 0;
  options.beta1 = options.beta2 = 0;
  adamw(adam_numbers(options, 1, 99), state.span());
  return state;
}

// Expects that the mean of `errors` is zero within four standard errors.
void expect_unbiased(const std::vector<double>& errors, const std::string& what) {
  double sum = 0;
  double sum_of_squares = 0;
  for (const double error : errors) {
    sum += error;
    sum_of_squares += error * error;
  }
  EXPECT_LT(std::fabs(sum), 4 * std::sqrt(sum_of_squares)) << what;
  EXPECT_GT(sum_of_squares, 0) << what;
}

TEST(StateFormat, StochasticRoundingIsUnbiased) {
  const int64_t n = 1000 * kScaleBlock;
  for (const StateFormat format : kLowBit) {
    for (const float value : {0.70001F, -0.5057F, 0.0813F, 0.0046F, -0.00123F}) {
      // Every block contains a 1, so its scale is 1.
      std::vector<float> values(static_cast<size_t>(n), value);
      for (int64_t i = 0; i < n; i += kScaleBlock) values[static_cast<size_t>(i)] = 1;
      HeldSpan state = stored(format, values);
      const std::vector<float> m = exported(state, StatePlane::exp_avg);
      const std::vector<float> v = exported(state, StatePlane::exp_avg_sq);
      const double square = static_cast<double>(value * value);
      std::vector<double> of_m;
      std::vector<double> of_v;
      for (size_t i = 0; i < m.size(); ++i) {
        if (i % kScaleBlock == 0) continue;
        of_m.push_back(static_cast<double>(m[i]) - static_cast<double>(value));
        // Rounding of codes is unbiased for the root, not its square.
        of_v.push_back(row_of(format).has_scales() ? std::sqrt(v[i]) - std::sqrt(square)
                                                   : static_cast<double>(v[i]) - square);
      }
      expect_unbiased(of_m, name_of(format) + " exp_avg " + std::to_string(value));
      expect_unbiased(of_v, name_of(format) + " exp_avg_sq " + std::to_string(value));
    }
  }
}

// Small elements must train as fast as in fp32. The slope of a regression of their updates on
// fp32's is measured for each size relative to the block's largest element.
struct Slope {
  double size = 0;
  double product = 0;  // sum of products of the updates in both formats
  double square = 0;   // sum of squares of fp32's updates
};

std::vector<Slope> update_slopes(StateFormat format) {
  std::vector<Slope> slopes = {{1}, {0.6}, {0.2}, {0.06}, {0.02}, {0.006}, {0.002}, {0.001}};
  const int64_t n = 32 * kScaleBlock;
  HeldSpan exact(StateFormat::fp32, 0, n);
  HeldSpan state(format, 0, n);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> grad(static_cast<size_t>(n));
  std::vector<float> before(grad.size());
  std::vector<float> before_exact(grad.size());
  AdamOptions options;
  options.weight_decay = 0;
  for (HeldSpan* each : {&exact, &state}) each->grad_dtype = DType::f32;
  for (int64_t step = 1; step <= 1500; ++step) {
    for (size_t i = 0; i < grad.size(); ++i) {
      grad[i] = normal(random) * static_cast<float>(slopes[i % slopes.size()].size);
    }
    for (HeldSpan* each : {&exact, &state}) {
      each->set_grad(grad);
      adamw(adam_numbers(options, step, 7), each->span());
    }
    const std::vector<float> after = exported(state, StatePlane::master);
    const std::vector<float> after_exact = exported(exact, StatePlane::master);
    for (size_t i = 0; i < grad.size() && step > 300; ++i) {
      const auto update = static_cast<double>(after[i] - before[i]);
      const auto of_exact = static_cast<double>(after_exact[i] - before_exact[i]);
      slopes[i % slopes.size()].product += update * of_exact;
      slopes[i % slopes.size()].square += of_exact * of_exact;
    }
    before = after;
    before_exact = after_exact;
  }
  return slopes;
}

TEST(StateFormat, SmallElementsOfABlockAreUpdatedAsInFp32) {
  for (const Slope& slope : update_slopes(StateFormat::int8_moments)) {
    EXPECT_NEAR(slope.product / slope.square, 1, 0.03) << slope.size;
  }
}

// ---- low-bit second moments

// Gradients of one step: 1/8 have the standard deviation 1, the rest have `others`.
std::vector<float> gradients(std::mt19937& random, int64_t n, float others) {
  std::normal_distribution<float> normal;
  std::vector<float> grad(static_cast<size_t>(n));
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = normal(random) * (i % 8 == 0 ? 1 : others);
  return grad;
}

TEST(StateFormat, LowBitExpAvgSqFollowsFallingGradients) {
  const int64_t n = 4 * kScaleBlock;
  std::vector<HeldSpan> states;
  for (const StateFormat format : kLowBit) {
    for (const DType grad_dtype : {DType::f32, DType::bf16}) {
      states.emplace_back(format, 0, n).grad_dtype = grad_dtype;
    }
  }
  std::vector<double> exact(static_cast<size_t>(n));
  std::mt19937 random(1);
  for (int64_t step = 1; step <= 6000; ++step) {
    const std::vector<float> grad = gradients(random, n, step <= 2000 ? 1.0F : 0.1F);
    for (size_t i = 0; i < exact.size(); ++i) {
      exact[i] += 0.001 * (static_cast<double>(grad[i]) * static_cast<double>(grad[i]) - exact[i]);
    }
    for (HeldSpan& each : states) {
      each.set_grad(grad);
      AdamSpan span = each.span();
      // bf16 gradients without `out` are stepped in pairs of vectors.
      if (each.grad_dtype == DType::bf16) span.out = nullptr;
      adamw(adam_numbers({}, step, 7), span);
    }
  }
  for (HeldSpan& each : states) {
    const std::vector<float> v = exported(each, StatePlane::exp_avg_sq);
    double sum = 0;
    for (size_t i = 0; i < v.size(); ++i) sum += i % 8 == 0 ? 0 : std::sqrt(v[i] / exact[i]);
    EXPECT_NEAR(sum / static_cast<double>(n - n / 8), 1.0, 0.02) << name_of(each.format);
  }
}

// ---- small updates

// Every update is one fp32 ulp, which is 1/256 ulp of the 24-bit master.
TEST(StateFormat, SmallUpdatesMoveAShortMasterOnAverage) {
  const int64_t n = 8 * kScaleBlock;
  const int64_t steps = 2000;
  HeldSpan state(StateFormat::int8_moments_24, 0, n);
  const std::vector<float> start(static_cast<size_t>(n), 1.5F);
  import_state({}, state.span(), StatePlane::master, start.data());
  state.set_grad(std::vector<float>(static_cast<size_t>(n), 1.0F));
  AdamOptions options;
  options.lr = 0x1p-23;
  options.weight_decay = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    adamw(adam_numbers(options, step, 7), state.span());
  }
  double mean = 0;
  for (const float p : exported(state, StatePlane::master)) {
    mean += (1.5 - static_cast<double>(p)) / 0x1p-23 / static_cast<double>(n);
  }
  // Each step moves by 256 fp32 ulps with probability 1/256, else not at all.
  const double sigma = 256 * std::sqrt(static_cast<double>(steps) / 256 / static_cast<double>(n));
  EXPECT_NEAR(mean, static_cast<double>(steps), 3 * sigma);
}

// As in torch and DeepSpeed: 1 - 1e-8 is 1 in fp32.
TEST(StateFormat, AnFp32MasterDoesNotDecayByOnePartInTenToTheEighth) {
  HeldSpan state(StateFormat::fp32, 0, 16);
  const std::vector<float> start = spread_values(1, 16);
  import_state({}, state.span(), StatePlane::master, start.data());
  AdamOptions options;
  options.lr = 1e-6;
  for (int64_t step = 1; step <= 1000; ++step) {
    adamw(adam_numbers(options, step, 0), state.span());
  }
  EXPECT_EQ(exported(state, StatePlane::master), start);
}

// ---- size of updates

// The largest update in units of lr, over 300 steps, in blocks with gradients from 1e-8 to 1e-2.
float largest_update(StateFormat format) {
  const int64_t n = 4 * kScaleBlock;
  HeldSpan state(format, 0, n);
  state.grad_dtype = DType::f32;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> sizes(static_cast<size_t>(n));
  for (float& size : sizes)
    size = std::pow(10.0F, -8 + 6e-3F * static_cast<float>(random() % 1001));
  AdamOptions options;
  options.weight_decay = 0;
  std::vector<float> before(sizes.size());
  float most = 0;
  for (int64_t step = 1; step <= 300; ++step) {
    std::vector<float> grad(sizes);
    for (float& g : grad) g *= normal(random);
    state.set_grad(grad);
    adamw(adam_numbers(options, step, 3), state.span());
    const std::vector<float> after = exported(state, StatePlane::master);
    for (size_t i = 0; i < after.size(); ++i)
      most = std::max(most, std::fabs(after[i] - before[i]));
    before = after;
  }
  return most / static_cast<float>(options.lr);
}

TEST(StateFormat, NoUpdateIsMuchLargerThanFp32s) {
  const float in_fp32 = largest_update(StateFormat::fp32);
  for (const StateFormat format : kLowBit) {
    EXPECT_LE(largest_update(format), 2 * in_fp32) << name_of(format) << ", fp32: " << in_fp32;
  }
}

}  // namespace
}  // namespace modicum
