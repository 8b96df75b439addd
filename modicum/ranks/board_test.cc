#include "modicum/ranks/board.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "modicum/base/clock_double.h"
#include "modicum/base/error_double.h"
#include "modicum/ranks/board_double.h"

namespace modicum {
namespace {

Error full_error() {
  Facts facts{.file = "model.safetensors", .tensor = "lm_head.weight"};
  facts.offset = 4711;
  facts.rank = 3;
  facts.culprit_rank = 2;
  facts.culprit_pid = 1234;
  facts.expected = "8 bytes";
  facts.got = "7 bytes";
  return Error(Category::format_trunc, "the file ended", std::move(facts));
}

ErrorRecord named(int rank, const std::string& what) {
  return record_of(Error(Category::io, what), rank);
}

TEST(ErrorRecord, KeepsTheFactsOfAnError) {
  const Error before = full_error();
  const Error after = error_of(record_of(before, 5));
  EXPECT_EQ(after.category(), before.category());
  EXPECT_STREQ(after.what(), before.what());
  EXPECT_EQ(after.facts().file, "model.safetensors");
  EXPECT_EQ(after.facts().tensor, "lm_head.weight");
  EXPECT_EQ(after.facts().offset, 4711U);
  EXPECT_EQ(after.facts().rank, 3) << "the error's own rank wins over the reporter's";
  EXPECT_EQ(after.facts().culprit_rank, 2);
  EXPECT_EQ(after.facts().culprit_pid, 1234);
  EXPECT_EQ(after.facts().expected, "8 bytes");
  EXPECT_EQ(after.facts().got, "7 bytes");
}

TEST(ErrorRecord, KeepsShortfallAndOwners) {
  Facts facts{.expected = "10", .got = "17", .shortfall_bytes = 7};
  facts.owners = {{"staging", 9}, {"shards", 5}, {"header", 3}};
  const Error after = error_of(record_of(Error(Category::budget, "too much", facts), 0));
  EXPECT_EQ(after.facts().shortfall_bytes, 7U);
  ASSERT_EQ(after.facts().owners.size(), facts.owners.size());
  for (size_t i = 0; i < facts.owners.size(); ++i) {
    EXPECT_EQ(after.facts().owners[i].purpose, facts.owners[i].purpose);
    EXPECT_EQ(after.facts().owners[i].bytes, facts.owners[i].bytes);
  }
}

TEST(ErrorRecord, AbsentFactsStayAbsentExceptTheRank) {
  const Error after = error_of(record_of(Error(Category::usage, "no"), 5));
  EXPECT_EQ(after.facts().rank, 5);
  EXPECT_FALSE(after.facts().offset);
  EXPECT_FALSE(after.facts().shortfall_bytes);
  EXPECT_TRUE(after.facts().owners.empty());
  EXPECT_FALSE(after.facts().culprit_rank);
  EXPECT_FALSE(after.facts().culprit_pid);
  EXPECT_STREQ(error_of(record_of(Error(Category::cancelled, "stopped"), std::nullopt)).what(),
               "CANCELLED: stopped");
}

TEST(ErrorRecord, LongTextsAreTruncatedAndTerminated) {
  Facts facts{.file = std::string(5000, 'f'), .tensor = std::string(256, 't')};
  facts.expected = std::string(127, 'e');
  facts.got = std::string(128, 'g');
  const Error after = error_of(record_of(Error(Category::io, std::string(512, 'w'), facts), 0));
  EXPECT_EQ(after.what_happened(), std::string(511, 'w'));
  EXPECT_EQ(after.facts().file, std::string(255, 'f'));
  EXPECT_EQ(after.facts().tensor, std::string(255, 't'));
  EXPECT_EQ(after.facts().expected, std::string(127, 'e')) << "a text that fits is not truncated";
  EXPECT_EQ(after.facts().got, std::string(127, 'g'));
}

// Must fail if a later failure overwrites the first.
TEST(SharedBoard, TheFirstFailureWins) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  EXPECT_FALSE(board.failure().has_value());
  EXPECT_TRUE(board.report(named(1, "first")));
  EXPECT_FALSE(board.report(named(0, "second")));
  EXPECT_STREQ(board.failure()->what, "first");
  EXPECT_EQ(board.failure()->rank, 1);
}

TEST(SharedBoard, OneFailureWinsAcrossThreads) {
  constexpr int kThreads = 8;
  SteadyClock clock;
  for (int round = 0; round < 20; ++round) {
    SharedBoard board(kThreads, clock);
    std::atomic<int> winners{0};
    std::atomic<int> winner{-1};
    run_workers(kThreads, [&](int rank) {
      if (board.report(named(rank, std::string(400, static_cast<char>('a' + rank))))) {
        ++winners;
        winner = rank;
      }
      while (!board.failure()) std::this_thread::yield();
      const ErrorRecord seen = *board.failure();
      EXPECT_EQ(std::string(seen.what), std::string(400, static_cast<char>('a' + *seen.rank)));
    });
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(board.failure()->rank, winner);
  }
}

TEST(SharedBoard, CheckNamesTheCulprit) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  EXPECT_NO_THROW(board.check());
  board.report(named(2, "the disk is on fire"));
  try {
    board.check();
    FAIL() << "expected PEER, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::peer);
    EXPECT_EQ(error.facts().culprit_rank, 2);
    EXPECT_EQ(error.facts().culprit_pid, getpid());
    EXPECT_EQ(error.what_happened(), "rank 2 failed: the disk is on fire");
  }
}

TEST(SharedBoard, CheckNamesTheLauncherIfNoRankFailed) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  board.report(record_of(Error(Category::io, "no space left on device"), std::nullopt));
  try {
    board.check();
    FAIL() << "expected PEER, got no error";
  } catch (const Error& error) {
    EXPECT_FALSE(error.facts().culprit_rank);
    EXPECT_EQ(error.facts().culprit_pid, getpid());
    EXPECT_EQ(error.what_happened(), "the launcher failed: no space left on device");
  }
}

TEST(SharedBoard, CheckNamesTheCulpritNotTheReporter) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  board.report(record_of(
      Error(Category::peer, "is stopped", {.rank = 0, .culprit_rank = 1, .culprit_pid = 99}), 0));
  try {
    board.check();
    FAIL() << "expected PEER, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.facts().culprit_rank, 1);
    EXPECT_EQ(error.facts().culprit_pid, 99);
  }
}

TEST(SharedBoard, CheckNamesNoPidIfThatOfTheCulpritIsUnknown) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  board.report(record_of(Error(Category::conflict, "other inputs", {.culprit_rank = 1}), 0));
  try {
    board.check();
    FAIL() << "expected PEER, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.facts().culprit_rank, 1);
    EXPECT_FALSE(error.facts().culprit_pid) << *error.facts().culprit_pid;
  }
}

// Must fail if a barrier does not wait.
TEST(SharedBoard, NoRankLeavesABarrierBeforeAllHaveArrived) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 50;
  SteadyClock clock;
  SharedBoard board(kRanks, clock);
  std::atomic<int> arrivals{0};
  run_workers(kRanks, [&](int rank) {
    for (int round = 1; round <= kRounds; ++round) {
      ++arrivals;
      board.barrier(rank);
      EXPECT_GE(arrivals.load(), round * kRanks);
      EXPECT_LE(arrivals.load(), (round + 1) * kRanks);
      EXPECT_FALSE(board.is_waiting(rank));
    }
  });
}

// Time passes only in the barrier's own sleeps, so the clock shows how long it waited.
TEST(SharedBoard, ABarrierWaitsForAMissingRank) {
  class LateClock final : public Clock {
   public:
    explicit LateClock(SharedBoard*& board) : board_(board) {}
    int64_t now_ns() override { return now_ns_; }
    void sleep_ns(int64_t duration_ns) override {
      EXPECT_TRUE(board_->is_waiting(0));
      now_ns_ += duration_ns;
      if (now_ns_ == 20 * kNsPerMs) board_->report(record_of(Error(Category::io, "gone"), 1));
    }

   private:
    SharedBoard*& board_;
    int64_t now_ns_ = 0;
  };
  SharedBoard* there = nullptr;
  LateClock clock(there);
  SharedBoard board(2, clock);
  there = &board;
  try {
    board.barrier(0);
    ADD_FAILURE() << "the barrier did not wait for rank 1";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::peer);
    EXPECT_EQ(error.facts().culprit_rank, 1);
  }
  EXPECT_EQ(clock.now_ns(), 20 * kNsPerMs);
}

// Otherwise the supervisor could see a rank that has left the barrier, with its last heartbeat from
// before the barrier, and call it stalled.
TEST(SharedBoard, ARankSendsAHeartbeatBeforeItLeavesTheBarrier) {
  class Observer final : public Clock {
   public:
    int64_t now_ns() override {
      EXPECT_TRUE(board->is_waiting(0));
      return 42;
    }
    void sleep_ns(int64_t) override {}
    const SharedBoard* board = nullptr;
  };
  Observer clock;
  SharedBoard board(1, clock);
  clock.board = &board;
  board.barrier(0);
  EXPECT_EQ(board.last_beat_ns(0), 42);
  EXPECT_FALSE(board.is_waiting(0));
}

TEST(SharedBoard, EqualDigestsAgree) {
  constexpr int kRanks = 3;
  SteadyClock clock;
  SharedBoard board(kRanks, clock);
  run_workers(kRanks, [&](int rank) { EXPECT_NO_THROW(board.agree(rank, {1, 2})); });
}

TEST(SharedBoard, AgreeNamesTheRankThatDiffersFromRankZero) {
  constexpr int kRanks = 4;
  SteadyClock clock;
  for (int other = 1; other < kRanks; ++other) {
    SharedBoard board(kRanks, clock);
    std::atomic<int> conflicts{0};
    run_workers(kRanks, [&](int rank) {
      try {
        board.agree(rank, {7, static_cast<uint64_t>(rank == other ? 9 : 8)});
      } catch (const Error& error) {
        EXPECT_EQ(error.category(), Category::conflict);
        EXPECT_EQ(error.facts().culprit_rank, other);
        EXPECT_EQ(error.facts().expected, (Digest{7, 8}.hex()));
        EXPECT_EQ(error.facts().got, (Digest{7, 9}.hex()));
        ++conflicts;
      }
    });
    EXPECT_EQ(conflicts, kRanks) << "a rank did not throw CONFLICT";
  }
}

TEST(SharedBoard, HeartbeatsAddUpProgressAndRecordTheTime) {
  FakeClock clock;
  SharedBoard board(2, clock);
  EXPECT_EQ(board.last_beat_ns(1), 0);
  clock.advance_ns(5);
  board.beat(1, 100);
  clock.advance_ns(5);
  board.beat(1, 11);
  EXPECT_EQ(board.progress(1), 111U);
  EXPECT_EQ(board.last_beat_ns(1), 10);
  EXPECT_EQ(board.progress(0), 0U);
  EXPECT_FALSE(board.is_done(1));
  board.set_done(1);
  EXPECT_TRUE(board.is_done(1));
  EXPECT_FALSE(board.is_done(0));
}

TEST(SharedBoard, HasOneRankAtLeastAndNoOthers) {
  SteadyClock clock;
  const auto refused = [](const auto& call) {
    const auto error = error_of(call);
    return error ? std::string(error->what()) : "";
  };
  for (const int none : {0, -1}) {
    EXPECT_EQ(refused([&] { SharedBoard(none, clock); }),
              "USAGE: a board needs ranks (expected 1 or more, got " + std::to_string(none) + ")");
  }
  SharedBoard board(2, clock);
  for (const int rank : {-1, 2}) {
    const std::string outside =
        "USAGE: a rank is out of range (expected 0 to 1, got " + std::to_string(rank) + ")";
    EXPECT_EQ(refused([&] { board.beat(rank, 1); }), outside);
    EXPECT_EQ(refused([&] { board.barrier(rank); }), outside);
    EXPECT_EQ(refused([&] { board.agree(rank, {}); }), outside);
    EXPECT_EQ(refused([&] { board.progress(rank); }), outside);
    EXPECT_EQ(refused([&] { board.posted_value<int>(rank); }), outside);
    EXPECT_EQ(refused([&] { board.post_value(rank, 1); }), outside);
  }
}

TEST(SharedBoard, ResultsArePerRankAndTruncated) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  EXPECT_TRUE(board.posted(0).empty());
  const std::vector<std::byte> all(SharedBoard::kResultBytes, std::byte{1});
  const std::vector<std::byte> more(SharedBoard::kResultBytes + 1, std::byte{2});
  board.post(0, all);
  board.post(1, more);
  EXPECT_TRUE(std::ranges::equal(board.posted(0), all));
  EXPECT_TRUE(std::ranges::equal(board.posted(1), std::span(more).first(all.size())));
}

TEST(ScriptedBoard, FailsAtTheScriptedCheckOrHeartbeat) {
  ScriptedBoard checks(1, {.fail_at_check = 2});
  EXPECT_NO_THROW(checks.check());
  EXPECT_THROW(checks.check(), Error);
  EXPECT_EQ(checks.checks(), 2);
  ScriptedBoard beats(1, {.fail_at_beat = 2, .culprit_rank = 5});
  beats.beat(0, 10);
  EXPECT_FALSE(beats.failure().has_value());
  beats.beat(0, 1);
  EXPECT_EQ(beats.failure()->rank, 5);
  EXPECT_EQ(beats.bytes_of_rank(0), 11U);
  EXPECT_THROW(beats.barrier(0), Error);
}

TEST(ScriptedBoard, BarriersWaitAndDigestsAreCompared) {
  ScriptedBoard board(3);
  std::atomic<int> arrived{0};
  std::atomic<int> conflicts{0};
  run_workers(3, [&](int rank) {
    ++arrived;
    board.barrier(rank);
    EXPECT_EQ(arrived, 3);
    try {
      board.agree(rank, {0, static_cast<uint64_t>(rank / 2)});
    } catch (const Error& error) {
      EXPECT_EQ(error.facts().culprit_rank, 2);
      ++conflicts;
    }
  });
  EXPECT_EQ(conflicts, 3);
}

}  // namespace
}  // namespace modicum
