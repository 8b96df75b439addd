#include "modicum/spec/powers.h"

#include <gtest/gtest.h>

namespace modicum {
namespace {

// The table agrees with repeated multiplication by an independent implementation of the field.
TEST(Powers, EqualRepeatedMultiplication) {
  __extension__ typedef unsigned __int128 Wide;
  constexpr uint64_t kPrime = Powers::kPrime;
  for (const uint64_t x : {uint64_t{2}, uint64_t{3}, kPrime - 1, uint64_t{1234567890123456789}}) {
    const Powers powers(x);
    uint64_t power = 1;
    for (uint64_t n = 0; n < 3000; ++n) {
      ASSERT_EQ(powers.power(n), power) << x << "^" << n;
      power = static_cast<uint64_t>(Wide{power} * x % kPrime);
    }
    EXPECT_EQ(powers.power(kPrime - 1), 1u);
    EXPECT_EQ(powers.power(kPrime), x);
    for (const int64_t stride : {-7, -1, 0, 1, 2, 1000}) {
      uint64_t sum = 0;
      for (uint64_t n = 1; n < 50; ++n) {
        const auto at = 50'000 + stride * static_cast<int64_t>(n - 1);
        sum = (sum + powers.power(static_cast<uint64_t>(at))) % kPrime;
        ASSERT_EQ(powers.sum(50'000, stride, n), sum) << stride << " x " << n;
      }
    }
  }
}

}  // namespace
}  // namespace modicum
