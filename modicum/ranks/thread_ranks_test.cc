#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "modicum/ranks/thread_ranks_double.h"

namespace modicum {
namespace {

TEST(ThreadRanks, EachRankRunsOnceOnTheSameBoard) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  std::atomic<int> sum{0};
  run_ranks_in_threads(board, clock,
                       [&](int rank) {
                         sum += 1 << rank;
                         board.barrier(rank);
                         EXPECT_EQ(sum, 7);
                       },
                       {});
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(board.is_done(rank));
}

TEST(ThreadRanks, TheFirstFailureIsThrownAndTheOthersEndByPeer) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  std::atomic<int> peers{0};
  const auto body = [&](int rank) {
    if (rank == 1) fail(Category::io, "the disk is on fire", {.file = "a"});
    try {
      board.barrier(rank);
    } catch (const Error& error) {
      peers += error.category() == Category::peer ? 1 : 0;
      throw;
    }
  };
  try {
    run_ranks_in_threads(board, clock, body, {});
    ADD_FAILURE() << "expected IO, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::io);
    EXPECT_EQ(error.facts().rank, 1);
    EXPECT_EQ(error.facts().file, "a");
  }
  EXPECT_EQ(peers, 2);
}

TEST(ThreadRanks, OtherExceptionsAreInternal) {
  SteadyClock clock;
  SharedBoard board(1, clock);
  try {
    run_ranks_in_threads(board, clock, [](int) { throw std::runtime_error("what"); }, {});
    ADD_FAILURE() << "expected INTERNAL, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::internal);
    EXPECT_EQ(error.what_happened(), "what");
  }
}

TEST(ThreadRanks, AnExceptionOfTheTickEndsTheRanks) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  SuperviseOptions options;
  options.tick = [] { fail(Category::cancelled, "enough"); };
  const auto wait = [&](int rank) {
    if (rank == 1) board.barrier(rank);
    while (rank == 0) board.check();
  };
  try {
    run_ranks_in_threads(board, clock, wait, options);
    ADD_FAILURE() << "expected CANCELLED, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::cancelled);
  }
}

}  // namespace
}  // namespace modicum
