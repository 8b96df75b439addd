#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace modicum
