#include "modicum/watch/cpu_allowance.h"

#include <gtest/gtest.h>

namespace modicum {
namespace {

constexpr double kDuty = 0.005;

// What is left, to the millisecond.
int64_t left_ms(const CpuAllowance& allowance) {
  int64_t ms = -2000;
  while (allowance.leaves(static_cast<double>((ms + 1) * kNsPerMs))) ++ms;
  return ms;
}

TEST(CpuAllowance, BeginsWithEnoughForAShortCommand) {
  EXPECT_EQ(left_ms(CpuAllowance(kDuty)), 100);
}

TEST(CpuAllowance, GainsTheDutyOfTheTimeUpToALimit) {
  CpuAllowance allowance(kDuty);
  allowance.refill(10 * kNsPerSecond);
  EXPECT_EQ(left_ms(allowance), 150);
  allowance.refill(1000 * kNsPerSecond);
  EXPECT_EQ(left_ms(allowance), 500);
}

TEST(CpuAllowance, ACostMayLeadToADebtThatTimePays) {
  CpuAllowance allowance(kDuty);
  allowance.spend(600 * kNsPerMs);
  EXPECT_EQ(left_ms(allowance), -500);
  EXPECT_FALSE(allowance.leaves(0));
  EXPECT_TRUE(allowance.leaves(-500.0 * kNsPerMs));
  allowance.refill(100 * kNsPerSecond);
  EXPECT_TRUE(allowance.leaves(0));
}

TEST(CpuAllowance, TheCostOfAReadingIsCounted) {
  const CpuAllowance allowance(kDuty);
  EXPECT_TRUE(allowance.leaves(50.0 * kNsPerMs, 50.0 * kNsPerMs));
  EXPECT_FALSE(allowance.leaves(50.0 * kNsPerMs, 51.0 * kNsPerMs));
}

TEST(CpuAllowance, OverALongTimeTheCostIsTheDuty) {
  CpuAllowance allowance(kDuty);
  int64_t spent_ms = 0;
  for (int second = 0; second < 10'000; ++second) {
    allowance.refill(kNsPerSecond);
    while (allowance.leaves(0)) {
      allowance.spend(kNsPerMs);
      ++spent_ms;
    }
  }
  EXPECT_NEAR(static_cast<double>(spent_ms), 100 + 10'000 * 1000 * kDuty, 2);
}

}  // namespace
}  // namespace modicum
