#include "modicum/base/sizes.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "modicum/base/error.h"

namespace modicum {
namespace {

constexpr uint64_t kMost = INT64_MAX;

TEST(OverBudget, HasTheThreeFigures) {
  EXPECT_EQ(over_budget(kGiB, kGiB + 512 * kMiB),
            "budget 1.00 GiB, needed 1.50 GiB, short by 512.00 MiB");
  EXPECT_EQ(over_budget(kGiB, kGiB + 1, "flag"),
            "budget 1.00 GiB (flag), needed 1.00 GiB, short by 1 B");
}

TEST(Counted, HasThePluralOfAllButOne) {
  EXPECT_EQ(counted(0, "node"), "0 nodes");
  EXPECT_EQ(counted(1, "node"), "1 node");
  EXPECT_EQ(counted(2, "node"), "2 nodes");
  EXPECT_EQ(counted(2, "process"), "2 processes");
}

TEST(ParseSize, HasUnitsOf1000AndOf1024) {
  EXPECT_EQ(parse_size("0"), 0U);
  EXPECT_EQ(parse_size("17"), 17U);
  EXPECT_EQ(parse_size("17B"), 17U);
  EXPECT_EQ(parse_size("2KB"), 2000U);
  EXPECT_EQ(parse_size("2MB"), 2'000'000U);
  EXPECT_EQ(parse_size("2GB"), 2'000'000'000U);
  EXPECT_EQ(parse_size("2TB"), 2'000'000'000'000U);
  EXPECT_EQ(parse_size("2KiB"), 2 * kKiB);
  EXPECT_EQ(parse_size("2MiB"), 2 * kMiB);
  EXPECT_EQ(parse_size("2GiB"), 2 * kGiB);
  EXPECT_EQ(parse_size("2TiB"), 2048 * kGiB);
}

TEST(ParseSize, AcceptsTheUnitsOfSlurmSystemdAndDocker) {
  EXPECT_EQ(parse_size("16G"), 16 * kGiB);
  EXPECT_EQ(parse_size("16g"), 16 * kGiB);
  EXPECT_EQ(parse_size("2k"), 2 * kKiB);
  EXPECT_EQ(parse_size("2M"), 2 * kMiB);
  EXPECT_EQ(parse_size("1T"), 1024 * kGiB);
  EXPECT_EQ(parse_size("1 GiB"), kGiB);
  EXPECT_EQ(parse_size("1.5 gib"), kGiB + kGiB / 2);
  EXPECT_EQ(parse_size("16gb"), 16'000'000'000U);
}

TEST(ParseSize, ALeadingZeroDoesNotMeanOctal) { EXPECT_EQ(parse_size("010"), 10U); }

TEST(ParseSize, FractionsAreRoundedDownToAByte) {
  EXPECT_EQ(parse_size("1.5GiB"), kGiB + kGiB / 2);
  EXPECT_EQ(parse_size("0.3KiB"), 307U);
  EXPECT_EQ(parse_size("1.9"), 1U);
  EXPECT_EQ(parse_size(".5KB"), 500U);
  EXPECT_EQ(parse_size("64.1KB"), 64'100U) << "not through a double";
  EXPECT_EQ(parse_count("1.001M"), 1'001'000U);
}

TEST(ParseSize, WholeNumbersAreExactUpToTheLimit) {
  EXPECT_EQ(parse_size("9007199254740993"), 9007199254740993U) << "not through a double";
  EXPECT_EQ(parse_size("9223372036854775807"), kMost);
  EXPECT_EQ(parse_size("8388607TiB"), uint64_t{8388607} << 40);
}

TEST(ParseSize, FractionsReachTheSameLimitOf2To63) {
  EXPECT_EQ(parse_size("8388607.5TiB"), (uint64_t{1} << 63) - (uint64_t{1} << 39));
  EXPECT_THROW(parse_size("8388608.0TiB"), Error);
}

TEST(ParseSize, RefusesOtherTexts) {
  for (const char* text : {"",
                           "B",
                           "GiB",
                           ".",
                           "1..5",
                           "1.2.3MB",
                           "-1",
                           "+1",
                           " 1",
                           "1 ",
                           " ",
                           "1 G iB",
                           "1GG",
                           "0x10",
                           "1e3",
                           "nan",
                           "inf",
                           "1,5GB",
                           "9223372036854775808",
                           "8388608TiB",
                           "18446744073709551616",
                           "99999999999999999999TiB",
                           "8388608.5TiB",
                           "1\n"}) {
    try {
      parse_size(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::usage) << text;
      EXPECT_EQ(error.what_happened().find('\n'), std::string::npos);
    }
  }
}

TEST(ParseSize, NamesANegativeNumber) {
  for (const char* text : {"-1", "-3 GiB", "-"}) {
    try {
      parse_size(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.what_happened(), "not a size: '" + std::string(text) + "' (negative)");
    }
  }
}

TEST(ParseCount, HasUnitsOf1000) {
  EXPECT_EQ(parse_count("12"), 12U);
  EXPECT_EQ(parse_count("12K"), 12'000U);
  EXPECT_EQ(parse_count("500M"), 500'000'000U);
  EXPECT_EQ(parse_count("1.5B"), 1'500'000'000U);
  EXPECT_EQ(parse_count("5k"), 5000U);
  for (const char* text : {"", "1KiB", "1GB", "1T", "-5M", "0x10"}) {
    EXPECT_THROW(parse_count(text), Error) << text;
  }
}

TEST(FormatSize, HasTwoDecimals) {
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(17), "17 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(kKiB), "1.00 KiB");
  EXPECT_EQ(format_size(kGiB + kGiB / 2), "1.50 GiB");
  EXPECT_EQ(format_size(uint64_t{3} << 50), "3.00 PiB");
  EXPECT_EQ(format_size(UINT64_MAX), "16384.00 PiB");
}

TEST(Checked, IsNulloptOnOverflow) {
  EXPECT_EQ(checked_add(UINT64_MAX - 1, 1), UINT64_MAX);
  EXPECT_EQ(checked_add(UINT64_MAX, 1), std::nullopt);
  EXPECT_EQ(checked_mul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1), UINT64_MAX - UINT32_MAX);
  EXPECT_EQ(checked_mul(uint64_t{1} << 32, uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(int64_t{1} << 32, int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(checked_mul(INT64_MIN, int64_t{-1}), std::nullopt);
}

TEST(Saturating, StopsAtTheLargestNumber) {
  EXPECT_EQ(saturating_add(UINT64_MAX - 1, 1), UINT64_MAX);
  EXPECT_EQ(saturating_add(UINT64_MAX - 1, 2), UINT64_MAX);
  EXPECT_EQ(saturating_add(2, 3), 5U);
  EXPECT_EQ(saturating_mul(uint64_t{1} << 32, uint64_t{1} << 32), UINT64_MAX);
  EXPECT_EQ(saturating_mul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1), UINT64_MAX - UINT32_MAX);
  EXPECT_EQ(saturating_mul(0, UINT64_MAX), 0U);
}

TEST(Rounding, DoesNotWrap) {
  EXPECT_EQ(round_up(UINT64_MAX, kPageBytes), UINT64_MAX / kPageBytes * kPageBytes);
  EXPECT_EQ(ceil_div(INT64_MAX, 2), int64_t{1} << 62);
  EXPECT_EQ(ceil_div(INT64_MAX, INT64_MAX), 1);
}

TEST(Rounding, IsUpwards) {
  EXPECT_EQ(round_up(0, 4096), 0U);
  EXPECT_EQ(round_up(1, 4096), 4096U);
  EXPECT_EQ(round_up(4096, 4096), 4096U);
  EXPECT_EQ(ceil_div(0, 3), 0);
  EXPECT_EQ(ceil_div(7, 3), 3);
  EXPECT_EQ(ceil_div(6, 3), 2);
}

TEST(NearestName, FindsTyposOnly) {
  const std::vector<std::string> names = {"shard", "replicate", "window", "stream"};
  EXPECT_EQ(nearest_name("shrad", names), "shard");
  EXPECT_EQ(nearest_name("replicated", names), "replicate");
  EXPECT_EQ(nearest_name("steam", names), "stream");
  EXPECT_EQ(nearest_name("window", names), "window");
  EXPECT_EQ(nearest_name("optimizer", names), "");
  EXPECT_EQ(nearest_name("xy", names), "") << "more than half of a short name is wrong";
  EXPECT_EQ(nearest_name("", names), "");
  EXPECT_EQ(nearest_name("shard", {}), "");
}

}  // namespace
}  // namespace modicum
