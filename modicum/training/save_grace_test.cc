#include "modicum/training/save_grace.h"

#include <gtest/gtest.h>

#include "modicum/base/clock_double.h"

namespace modicum {
namespace {

// Two ranks that write 100 bytes together.
class Grace : public testing::Test {
 protected:
  SaveGrace with_seconds(int64_t seconds) { return {seconds * kNsPerSecond, 100, board_, clock_}; }

  FakeClock clock_;
  SharedBoard board_{2, clock_};
};

TEST_F(Grace, IsGrantedWhenTheRestFits) {
  // 40 bytes in 8 s: the other 60 take 12 s, with a margin of a quarter 15 s, and 1 s to commit.
  for (const auto& [seconds, fits] : {std::pair{16, true}, {15, false}}) {
    SaveGrace grace = with_seconds(seconds);
    board_.beat(0, 7);  // progress of the load, which must not count
    grace.begin(0);
    grace.begin(1);
    clock_.advance_ns(8 * kNsPerSecond);
    board_.beat(0, 30);
    board_.beat(1, 10);
    EXPECT_EQ(grace.granted_ns(), fits ? seconds * kNsPerSecond : 0) << seconds;
  }
}

TEST_F(Grace, IsNotGrantedBeforeThereIsARate) {
  SaveGrace unbegun = with_seconds(1000);
  unbegun.begin(0);
  board_.beat(0, 50);
  clock_.advance_ns(kNsPerSecond);
  EXPECT_EQ(unbegun.granted_ns(), 0) << "rank 1 has not begun";
  SaveGrace unwritten = with_seconds(1000);
  unwritten.begin(0);
  unwritten.begin(1);
  clock_.advance_ns(kNsPerSecond);
  EXPECT_EQ(unwritten.granted_ns(), 0) << "no rank has written a byte yet";
}

TEST_F(Grace, IsDecidedOnce) {
  SaveGrace grace = with_seconds(10);
  grace.begin(0);
  grace.begin(1);
  EXPECT_EQ(grace.granted_ns(), 0);
  clock_.advance_ns(kNsPerSecond);
  board_.beat(0, 99);
  EXPECT_EQ(grace.granted_ns(), 0);
  EXPECT_TRUE(grace.is_over());
}

TEST_F(Grace, IsOverAfterItsTime) {
  SaveGrace grace = with_seconds(10);
  grace.begin(0);
  grace.begin(1);
  clock_.advance_ns(kNsPerSecond);
  board_.beat(0, 100);
  EXPECT_FALSE(grace.is_over());
  clock_.advance_ns(10 * kNsPerSecond - 1);
  EXPECT_FALSE(grace.is_over());
  clock_.advance_ns(1);
  EXPECT_TRUE(grace.is_over());
}

TEST_F(Grace, OfZeroSecondsIsOverImmediately) {
  SaveGrace grace = with_seconds(0);
  grace.begin(0);
  grace.begin(1);
  board_.beat(0, 100);
  EXPECT_TRUE(grace.is_over());
}

}  // namespace
}  // namespace modicum
