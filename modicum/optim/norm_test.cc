// Tests of the clip factor, the norm and the loss scale. Catches: squares summed in fp32, a
// non-finite norm that is returned as a number, a scale that grows while gradients overflow.
#include "modicum/optim/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

TEST(ClipFactor, IsWithinOneUlpOfTorchsFormula) {
  for (const double norm : {1e-20, 0.1, 1.0, 3.3, 2236.067, 7e19, 3e30}) {
    for (const double ratio : {0.01, 0.999999, 1.0, 1.000001, 50.0}) {
      const double max_norm = norm * ratio;
      const auto exact = static_cast<double>(std::min(
          1.0L, static_cast<long double>(max_norm) / (static_cast<long double>(norm) + 1e-6L)));
      const float factor = clip_factor(norm, max_norm);
      const double ulp = std::nextafter(factor, 2.0F) - factor;
      EXPECT_NEAR(factor, exact, ulp) << norm << " " << ratio;
      EXPECT_LE(factor, 1.0F);
    }
  }
  EXPECT_EQ(clip_factor(5, std::numeric_limits<double>::infinity()), 1.0F);
  EXPECT_EQ(clip_factor(5, 0), 0.0F);
  EXPECT_EQ(clip_factor(0, 1), 1.0F);
}

TEST(GradNorm, SumsInFp64) {
  // The sum contains squares that overflow fp32, and squares that fp32 would lose in the sum.
  const std::vector<GradNorm> parts = {{1e40}, {3.0}, {1e24 + 1}, {0.25}};
  GradNorm sum;
  for (const GradNorm& part : parts) sum += part;
  EXPECT_EQ(sum.sum_of_squares, 1e40 + 3.0 + (1e24 + 1) + 0.25);
  EXPECT_EQ(sum.norm(0.5), std::sqrt(sum.sum_of_squares) * 0.5);
  GradNorm small;
  for (int i = 0; i < 1000; ++i) small += {1.0 + 1e-10};
  EXPECT_NEAR(small.sum_of_squares, 1000 + 1e-7, 1e-10);
}

TEST(GradNorm, ANonFiniteNormIsAFlagNotANumber) {
  GradNorm sum{4.0};
  sum += {0, false};
  sum += {9.0};
  EXPECT_FALSE(sum.finite);
  EXPECT_EQ(sum.sum_of_squares, 0);
  EXPECT_EQ(sum.norm(), 0);
}

TEST(LossScale, DoublesAfter2000FiniteStepsAndHalvesAtAnOverflow) {
  LossScale scale;
  EXPECT_EQ(scale.scale, 65536.0F);
  EXPECT_EQ(scale.unscale(), 1.0F / 65536);
  for (int step = 0; step < 1999; ++step) scale.update(true);
  EXPECT_EQ(scale.scale, 65536.0F);
  scale.update(false);
  EXPECT_EQ(scale.scale, 32768.0F);
  for (int step = 0; step < 1999; ++step) scale.update(true);
  EXPECT_EQ(scale.scale, 32768.0F) << "the overflow restarts the count";
  scale.update(true);
  EXPECT_EQ(scale.scale, 65536.0F);
}

TEST(LossScale, NeverGrowsToInfinity) {
  LossScale scale{.scale = 3e38F, .growth_interval = 1};
  scale.update(true);
  EXPECT_EQ(scale.scale, 3e38F);
}

}  // namespace
}  // namespace modicum
