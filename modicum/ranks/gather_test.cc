// Catches: a byte is written to the wrong place, twice or not at all; a slot is filled while it is
// written; adjacent runs are not written together; a rank waits forever.
#include "modicum/ranks/gather.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>
#include <vector>

namespace modicum {
namespace {

constexpr uint64_t kPartBytes = 4 * kPageBytes;  // a slot is one page

struct Put {
  uint64_t at = 0;
  uint64_t bytes = 0;
};
using Puts = std::vector<std::vector<Put>>;  // by rank: its puts in order

std::byte value_at(uint64_t at) { return static_cast<std::byte>((at * 31 + at / 241) & 0xff); }

// The written bytes, and how often each was written, in memory that the ranks share.
struct GatherOutput {
  explicit GatherOutput(uint64_t bytes)
      : pages(Mapping::shared(2 * bytes + kPageBytes)), size(bytes) {}

  std::span<std::byte> values() const { return pages.bytes().first(size); }
  std::span<std::byte> times() const { return pages.bytes().subspan(size, size); }
  std::atomic<uint64_t>& writes() const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(pages.bytes().last(kPageBytes).data());
  }
  void add(uint64_t at, std::span<const std::byte> bytes) const {
    ASSERT_LE(at + bytes.size(), size);
    std::copy(bytes.begin(), bytes.end(), values().begin() + static_cast<int64_t>(at));
    for (std::byte& time : times().subspan(at, bytes.size())) {
      time = static_cast<std::byte>(static_cast<int>(time) + 1);
    }
    ++writes();
  }

  Mapping pages;
  uint64_t size;
};

// Puts the bytes of one rank, `uses` times.
void put_all(Gather& gather, const std::vector<Put>& puts, const GatherOutput& to, int uses) {
  const auto write = [&](uint64_t at, std::span<const std::byte> bytes) { to.add(at, bytes); };
  for (int i = 0; i < uses; ++i) {
    for (const Put& put : puts) {
      std::vector<std::byte> bytes(put.bytes);
      for (uint64_t b = 0; b < put.bytes; ++b) bytes[b] = value_at(put.at + b);
      gather.put(put.at, bytes, write);
    }
    gather.finish(write);
  }
}

void expect_written(const Puts& puts, const GatherOutput& written, int uses) {
  std::vector<int> expected(written.size);
  for (const auto& of_rank : puts) {
    for (const Put& put : of_rank) {
      for (uint64_t b = 0; b < put.bytes; ++b) expected[put.at + b] += uses;
    }
  }
  for (uint64_t at = 0; at < written.size; ++at) {
    ASSERT_EQ(static_cast<int>(written.times()[at]), expected[at]) << at;
    if (expected[at] > 0) {
      ASSERT_EQ(written.values()[at], value_at(at)) << at;
    }
  }
}

// Runs the ranks as threads and checks every byte. Returns the number of writes.
uint64_t gathered(const Puts& puts, uint64_t size, int uses = 1) {
  const auto world = static_cast<int>(puts.size());
  SteadyClock clock;
  SharedBoard board(world, clock);
  SharedGather shared(world, kPartBytes);
  EXPECT_EQ(shared.slot_bytes(), kPageBytes);
  const GatherOutput written(size);
  run_workers(world, [&](int rank) {
    Gather gather(shared, board, rank, rank);
    put_all(gather, puts[static_cast<size_t>(rank)], written, uses);
  });
  expect_written(puts, written, uses);
  return written.writes();
}

// Rows of `row` bytes; each rank puts an equal part of every row.
Puts rows_of(int world, uint64_t row, uint64_t rows) {
  Puts puts(static_cast<size_t>(world));
  const uint64_t part = row / static_cast<uint64_t>(world);
  for (uint64_t r = 0; r < rows; ++r) {
    for (size_t rank = 0; rank < puts.size(); ++rank) {
      puts[rank].push_back({r * row + rank * part, part});
    }
  }
  return puts;
}

TEST(Gather, EachWindowOfCompleteRowsIsWrittenInOneCall) {
  for (int world = 1; world <= 5; ++world) {
    for (const uint64_t part : {1, 6, 100, 4096, 5000}) {
      const uint64_t row = part * static_cast<uint64_t>(world);
      const uint64_t rows = 30 * kPageBytes / row + 1;
      EXPECT_EQ(gathered(rows_of(world, row, rows), row * rows),
                ceil_div(static_cast<int64_t>(row * rows), static_cast<int64_t>(kPageBytes)))
          << world << " ranks, " << part;
    }
  }
}

// Rank 1 puts no bytes, and rank 2 only those of the first 50 rows: their other bytes stay
// unwritten.
TEST(Gather, HolesStayUnwritten) {
  Puts puts = rows_of(4, 1000, 100);
  puts[1].clear();
  puts[2].resize(50);
  // Column 1 is a hole in each of the 100 rows, so each use of the gather needs a write per row.
  EXPECT_GE(gathered(puts, 100'000, 3), 3U * 100);
}

// Runs of random length; in every second trial also in random order, so that lists become full and
// addresses go back.
TEST(Gather, AnyOrderIsWrittenOnce) {
  std::minstd_rand dice(7);
  for (int trial = 0; trial < 20; ++trial) {
    Puts puts(3);
    uint64_t at = 0;
    while (at < 40 * kPageBytes) {
      const uint64_t bytes = dice() % 3 == 0 ? 4 : 1 + dice() % 300;
      if (dice() % 8 != 0) puts[dice() % 3].push_back({at, bytes});
      at += bytes;
    }
    if (trial % 2 == 1) {
      for (auto& of_rank : puts) std::shuffle(of_rank.begin(), of_rank.end(), dice);
    }
    gathered(puts, at);
  }
}

// All even rows, then all odd rows. Rank 0 has no even row of the second half, and so goes back
// earlier than the others.
TEST(Gather, RanksThatGoBackTogetherWriteTogether) {
  Puts puts = rows_of(4, 4 * 512, 100), sorted(4);
  for (size_t rank = 0; rank < 4; ++rank) {
    for (const uint64_t odd : {0, 1}) {
      const uint64_t end = rank == 0 && odd == 0 ? 50 : 100;
      for (uint64_t r = odd; r < end; r += 2) sorted[rank].push_back(puts[rank][r]);
    }
  }
  EXPECT_EQ(gathered(sorted, 100 * 4 * 512), 100U) << "expected one write per row";
}

TEST(Gather, ProcessesMapTheMemoryByItsAddress) {
  SteadyClock clock;
  const Puts puts = rows_of(3, 3 * 70, 300);
  SharedBoard board(3, clock);
  const SharedGather shared(3, kPartBytes);
  const GatherOutput written(3 * 70 * 300);
  EXPECT_FALSE(SharedGather::open(shared.address(), 2, kPartBytes).has_value())
      << "its size is that of 3 ranks";
  const std::string path = shared.address().substr(0, shared.address().rfind('#'));
  const SharedGather other(3, kPartBytes);
  const std::string token = other.address().substr(other.address().rfind('#'));
  EXPECT_FALSE(SharedGather::open(path + token, 3, kPartBytes).has_value()) << "other memory";
  EXPECT_FALSE(SharedGather::open(path, 3, kPartBytes).has_value());
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      auto opened = SharedGather::open(shared.address(), 3, kPartBytes);
      if (!opened) _exit(1);
      Ledger ledger;
      Gather gather(*opened, board, rank, rank);
      gather.commit(ledger);
      board.barrier(rank);
      put_all(gather, puts[static_cast<size_t>(rank)], written, 1);
      _exit(ledger.footprint()[Purpose::staging] == kPartBytes ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  expect_written(puts, written, 1);
}

// Must fail if no rank is charged for a part.
TEST(Gather, EachRankIsChargedItsPartAsStaging) {
  SteadyClock clock;
  SharedBoard board(3, clock);
  SharedGather shared(3, kPartBytes);
  for (int rank = 0; rank < 3; ++rank) {
    Ledger ledger(kPartBytes);
    {
      Gather gather(shared, board, rank, rank);
      gather.commit(ledger);
      EXPECT_EQ(ledger.footprint()[Purpose::staging], kPartBytes);
      EXPECT_EQ(ledger.footprint().total(), kPartBytes);
    }
    EXPECT_EQ(ledger.footprint(), Footprint{});
    Ledger tight(kPartBytes - 1);
    Gather gather(shared, board, rank, rank);
    EXPECT_THROW(gather.commit(tight), Error);
  }
}

// Must also fail if a waiting rank sends no heartbeats: the supervisor would call that a stall.
TEST(Gather, AFailedRankEndsTheWait) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  SharedGather shared(2, kPartBytes);
  run_workers(2, [&](int rank) {
    if (rank == 1) {
      while (board.last_beat_ns(0) == 0) clock.sleep_ns(kNsPerMs);
      board.report(record_of(Error(Category::io, "broken"), rank));
      return;
    }
    Gather gather(shared, board, rank, rank);
    try {
      gather.finish([](uint64_t, std::span<const std::byte>) {});
      ADD_FAILURE() << "expected PEER, got no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::peer);
      EXPECT_EQ(error.facts().culprit_rank, 1);
    }
  });
  EXPECT_EQ(board.progress(0), 0U);
}

}  // namespace
}  // namespace modicum
