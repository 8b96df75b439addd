#include <gtest/gtest.h>

#include <string>

#include "modicum/kernels/adamw_reference_double.h"
#include "modicum/kernels/adamw_torch_double.h"
#include "modicum/kernels/held_span_double.h"

namespace modicum {
namespace {

uint64_t digest_of(const std::vector<std::byte>& bytes) {
  uint64_t digest = 0xcbf29ce484222325U;
  for (size_t i = 0; i < bytes.size(); i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i, sizeof word);
    digest = (digest ^ word) * 0x100000001b3U;
  }
  return digest;
}

void expect_torch(const TorchRun& run) {
  HeldSpan held(StateFormat::fp32, 0, kTorchCount);
  const std::vector<float> start = spread_values(0, kTorchCount);
  std::memcpy(held.master.data(), start.data(), start.size() * sizeof(float));
  size_t row = 0;
  for (int64_t step = 1; step <= kTorchSteps.back(); ++step) {
    AdamNumbers numbers = adam_numbers(run.options, step, 0);
    numbers.unscale = run.unscale;
    numbers.clip = run.clip;
    held.set_grad(spread_values(step, kTorchCount));
    adamw(numbers, held.span());
    if (step != kTorchSteps[row]) continue;
    const TorchDigests& digests = run.after[row++];
    EXPECT_EQ(digest_of(held.master.bytes()), digests[0]) << "step " << step;
    EXPECT_EQ(digest_of(held.exp_avg.bytes()), digests[1]) << "step " << step;
    EXPECT_EQ(digest_of(held.exp_avg_sq.bytes()), digests[2]) << "step " << step;
    if (!run.options.amsgrad) continue;
    EXPECT_EQ(digest_of(held.max_exp_avg_sq.bytes()), digests[3]) << "step " << step;
  }
}

// Two units in the last place of the parameter or of what it has moved, whichever is larger.
void expect_near_in_one_step(float ours, float torchs, float before) {
  const float size = std::max(std::fabs(torchs), std::fabs(torchs - before));
  const float place = std::nextafter(size, 2 * size) - size;
  EXPECT_NEAR(ours, torchs, 2 * place);
}

void expect_near_torch(const TorchRun& run) {
  HeldSpan held(StateFormat::fp32, 0, kTorchCount);
  const std::vector<float> start = spread_values(0, kTorchCount);
  std::memcpy(held.master.data(), start.data(), start.size() * sizeof(float));
  std::vector<float> p(kTorchCount);
  for (int64_t step = 1; step <= kTorchSteps.back(); ++step) {
    AdamNumbers numbers = adam_numbers(run.options, step, 0);
    numbers.unscale = run.unscale;
    numbers.clip = run.clip;
    held.set_grad(spread_values(step, kTorchCount));
    adamw(numbers, held.span());
    std::memcpy(p.data(), held.master.data(), p.size() * sizeof(float));
    for (size_t i = 0; step == 1 && i < run.after_first.size(); ++i) {
      expect_near_in_one_step(p[i], run.after_first[i], start[i]);
    }
  }
  for (size_t i = 0; i < run.after_last.size(); ++i) {
    const float size = std::max(std::fabs(p[i]), std::fabs(p[i] - start[i]));
    EXPECT_NEAR(p[i], run.after_last[i], 1e-6F * size);
  }
}

TEST(AdamW, NearTorchWithItsOwnSquareRoots) {
  for (size_t i = 0; i < kTorchRuns.size(); ++i) {
    SCOPED_TRACE("run " + std::to_string(i));
    expect_near_torch(kTorchRuns[i]);
  }
}

TEST(AdamW, TorchsBitsAfterAThousandSteps) {
  for (const std::string_view isa : isas()) {
    use_isa(isa);
    for (size_t i = 0; i < kTorchRuns.size(); ++i) {
      SCOPED_TRACE(std::string(isa) + ", run " + std::to_string(i));
      expect_torch(kTorchRuns[i]);
    }
  }
  use_isa(isas().front());
}

// What a step can be told, one from each row.
struct Told {
  AdamSemantics semantics;
  bool decoupled, amsgrad, maximize, bias_correction;
  double beta1;
  float unscale, clip;
  DType grad;
  DType out;
};
constexpr Told kTold[] = {
    {AdamSemantics::torch, true, false, false, true, 0.9, 1, 1, DType::bf16, DType::bf16},
    {AdamSemantics::torch, false, false, true, true, 0.4, 0.125F, 0.37F, DType::f16, DType::f16},
    {AdamSemantics::torch, true, true, false, false, 0.95, 1, 0.7F, DType::f32, DType::bf16},
    {AdamSemantics::deepspeed, true, false, false, true, 0.9, 1, 0.9F, DType::bf16, DType::f16},
    {AdamSemantics::deepspeed, false, false, false, false, 0.8, 0.5F, 1, DType::f32, DType::bf16},
};

AdamNumbers numbers_of(const Told& told, int64_t step) {
  AdamOptions options;
  options.semantics = told.semantics;
  options.beta1 = told.beta1;
  options.decoupled = told.decoupled;
  options.amsgrad = told.amsgrad;
  options.maximize = told.maximize;
  options.bias_correction = told.bias_correction;
  AdamNumbers numbers = adam_numbers(options, step, 0xfeedbeefU);
  numbers.unscale = told.unscale;
  numbers.clip = told.clip;
  return numbers;
}

HeldSpan begun(StateFormat format, const Told& told, int64_t first, int64_t n) {
  HeldSpan held(format, first, n, 1);
  held.grad_dtype = told.grad;
  held.out_dtype = told.out;
  import_state(numbers_of(told, 1), held.span(), StatePlane::master, spread_values(0, n).data());
  return held;
}

void expect_reference(StateFormat format, const Told& told, int64_t first, int64_t n,
                      int64_t steps) {
  HeldSpan expected = begun(format, told, first, n);
  std::vector<HeldSpan> held(isas().size(), expected);
  for (int64_t step = 1; step <= steps; ++step) {
    const std::vector<float> grad = spread_values(step, n);
    const AdamNumbers numbers = numbers_of(told, step);
    expected.set_grad(grad);
    reference_adamw(numbers, expected.span());
    for (size_t i = 0; i < held.size(); ++i) {
      use_isa(isas()[i]);
      held[i].set_grad(grad);
      adamw(numbers, held[i].span());
    }
  }
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_TRUE(held[i] == expected) << isas()[i] << ", " << row_of(format).name << ", told "
                                     << &told - kTold << ", " << n << " from " << first;
  }
  use_isa(isas().front());
}

TEST(AdamW, NoBitDiffersFromTheReferenceAfterAThousandSteps) {
  for (const StateFormatRow& row : state_formats()) {
    for (const Told& told : kTold) expect_reference(row.format, told, 120, 45, 1000);
  }
}

TEST(AdamW, NoBitDiffersFromTheReferenceAtAnyOffsetAndLength) {
  for (const StateFormatRow& row : state_formats()) {
    for (const int64_t first : {int64_t{0}, int64_t{5}, int64_t{127}, (int64_t{1} << 33) + 77}) {
      for (const int64_t n : {0, 1, 7, 128, 131, 400}) {
        for (const Told& told : kTold) expect_reference(row.format, told, first, n, 2);
      }
    }
  }
}

// At multiples of a scale block where moments are codes, elsewhere anywhere.
TEST(AdamW, NoCutChangesABit) {
  for (const StateFormatRow& row : state_formats()) {
    const int64_t first = 3 * kScaleBlock;
    HeldSpan whole = begun(row.format, kTold[0], first, 1000);
    HeldSpan cut = whole;
    for (int64_t step = 1; step <= 3; ++step) {
      const AdamNumbers numbers = numbers_of(kTold[0], step);
      for (HeldSpan* held : {&whole, &cut}) held->set_grad(spread_values(step, 1000));
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

}  // namespace
}  // namespace modicum
