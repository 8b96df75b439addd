#include "modicum/base/sizes.h"

#include <gtest/gtest.h>

#include "modicum/base/error.h"

namespace modicum {
namespace {

TEST(Sizes, UnitsWithAnIArePowersOf1024AndOthersOf1000) {
  EXPECT_EQ(parse_size("17"), 17u);
  EXPECT_EQ(parse_size("17B"), 17u);
  EXPECT_EQ(parse_size("2KB"), 2000u);
  EXPECT_EQ(parse_size("2KiB"), 2048u);
  EXPECT_EQ(parse_size("1.5GiB"), 3 * kGiB / 2);
  EXPECT_EQ(parse_size("1TB"), 1'000'000'000'000u);
}

TEST(Sizes, WholeBytesStayExactAboveTheFiftyThreeBitsOfADouble) {
  EXPECT_EQ(parse_size("9007199254740993"), 9007199254740993u);
  EXPECT_EQ(parse_size("9223372036854775807"), 9223372036854775807u);
}

TEST(Sizes, WhatIsNoSizeIsAUsageError) {
  for (const char* text : {"", "MiB", "1.5.0MiB", "12mib", "-1", "1 GiB", "9223372036854775808",
                           "9000000TiB", "1e3"}) {
    try {
      parse_size(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::usage) << text;
    }
  }
}

TEST(Sizes, CountsArePowersOf1000) {
  EXPECT_EQ(parse_count("500M"), 500'000'000u);
  EXPECT_EQ(parse_count("1.5B"), 1'500'000'000u);
}

TEST(Sizes, AreShownWithTwoDecimals) {
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(1536), "1.50 KiB");
  EXPECT_EQ(format_size(3 * kGiB / 2), "1.50 GiB");
}

TEST(Sizes, RoundUpGoesToTheNextStepAndNotBeyond) {
  EXPECT_EQ(round_up(0, kPageBytes), 0u);
  EXPECT_EQ(round_up(1, kPageBytes), kPageBytes);
  EXPECT_EQ(round_up(kPageBytes, kPageBytes), kPageBytes);
  EXPECT_EQ(round_up(kPageBytes + 1, kPageBytes), 2 * kPageBytes);
}

TEST(Sizes, CheckedArithmeticSaysWhenItDoesNotFit) {
  EXPECT_EQ(checked_add(uint64_t{1}, uint64_t{2}), 3u);
  EXPECT_EQ(checked_add(UINT64_MAX, uint64_t{1}), std::nullopt);
  EXPECT_EQ(checked_mul(uint64_t{1} << 32, uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(checked_mul(INT64_MAX, int64_t{2}), std::nullopt);
}

TEST(NearestName, FindsATypoAndNothingForAnotherWord) {
  const std::vector<std::string> verbs = {"inspect", "plan", "load", "synth"};
  EXPECT_EQ(nearest_name("inspekt", verbs), "inspect");
  EXPECT_EQ(nearest_name("laod", verbs), "load");
  EXPECT_EQ(nearest_name("frobnicate", verbs), "");
  EXPECT_EQ(nearest_name("xy", verbs), "");
}

}  // namespace
}  // namespace modicum
