#include "modicum/ranks/exchange.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <vector>

#include "modicum/ranks/board_double.h"
#include "modicum/ranks/exchange_double.h"

namespace modicum {
namespace {

// Size of a slot in exchange.cc: the parts of all ranks are divided into four slots.
uint64_t slot_bytes(int world, uint64_t part_bytes) {
  return part_bytes * static_cast<uint64_t>(world) / 4;
}

// Byte `i` of broadcast number `call`.
std::byte sent(int call, size_t i) {
  return static_cast<std::byte>((static_cast<size_t>(call) * 37 + i * 11 + i / 251) & 0xff);
}

std::vector<size_t> sizes_around_slots(int world, uint64_t part_bytes) {
  const size_t slot = slot_bytes(world, part_bytes);
  return {0, 1, slot - 1, slot, slot + 1, 3, 4 * slot, 5 * slot + 7, 0, 11 * slot};
}

// Broadcasts every size from every root. Returns whether every byte was right.
bool all_arrive(Exchange& exchange, int rank, int world, const std::vector<size_t>& sizes) {
  int call = 0;
  for (int root = 0; root < world; ++root) {
    for (const size_t size : sizes) {
      ++call;
      std::vector<std::byte> bytes(size);
      if (rank == root) {
        for (size_t i = 0; i < size; ++i) bytes[i] = sent(call, i);
      }
      exchange.broadcast(root, bytes);
      for (size_t i = 0; i < size; ++i) {
        if (bytes[i] != sent(call, i)) return false;
      }
    }
  }
  return true;
}

TEST(RingExchange, ThreadsReceiveEverySizeFromEveryRoot) {
  SteadyClock clock;
  for (int world = 1; world <= 5; ++world) {
    SharedBoard board(world, clock);
    SharedRing ring(world, kPageBytes);
    run_workers(world, [&](int rank) {
      RingExchange exchange(ring, board, rank, rank);
      EXPECT_TRUE(all_arrive(exchange, rank, world, sizes_around_slots(world, kPageBytes)))
          << "rank " << rank << " of " << world;
    });
  }
}

// Forks a process per rank and returns how many of their bodies returned true.
int count_succeeded(int world, const std::function<bool(int rank)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      bool is_true = false;
      try {
        is_true = body(rank);
      } catch (const std::exception&) {
      }
      _exit(is_true ? 0 : 1);
    }
    children.push_back(child);
  }
  int succeeded = 0;
  for (const pid_t child : children) {
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) ++succeeded;
  }
  return succeeded;
}

TEST(RingExchange, ProcessesReceiveEverySizeFromEveryRoot) {
  SteadyClock clock;
  for (int world = 2; world <= 5; ++world) {
    SharedBoard board(world, clock);
    SharedRing ring(world, kPageBytes);
    const int succeeded = count_succeeded(world, [&](int rank) {
      Ledger ledger;
      RingExchange exchange(ring, board, rank, rank);
      const Charge charge = exchange.commit(ledger);
      board.barrier(rank);
      return all_arrive(exchange, rank, world, sizes_around_slots(world, kPageBytes));
    });
    EXPECT_EQ(succeeded, world);
  }
}

// Must fail if no rank is charged for a part of the ring.
TEST(RingExchange, EachRankIsChargedItsPartAsStaging) {
  SteadyClock clock;
  for (const uint64_t part_bytes : {kPageBytes, 7 * kPageBytes}) {
    for (int world = 1; world <= 5; ++world) {
      SharedBoard board(world, clock);
      SharedRing ring(world, part_bytes);
      for (int rank = 0; rank < world; ++rank) {
        Ledger ledger(part_bytes);
        RingExchange exchange(ring, board, rank, rank);
        {
          const Charge charge = exchange.commit(ledger);
          EXPECT_EQ(charge.bytes(), part_bytes);
          EXPECT_EQ(ledger.footprint()[Purpose::staging], part_bytes);
          EXPECT_EQ(ledger.footprint().total(), part_bytes);
        }
        EXPECT_EQ(ledger.footprint(), Footprint{});
        Ledger tight(part_bytes - 1);
        EXPECT_THROW(exchange.commit(tight), Error);
      }
    }
  }
}

// Of two ranks, `waiter` takes part in a broadcast and the other one fails instead. Expects that
// `waiter` throws PEER within a second.
void expect_end_by_peer(int waiter, int root, size_t bytes) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  SharedRing ring(2, kPageBytes);
  std::atomic<int64_t> failed_ns{0};
  run_workers(2, [&](int rank) {
    if (rank != waiter) {
      // The waiter sends its first heartbeat when it begins to wait.
      while (board.last_beat_ns(waiter) == 0) clock.sleep_ns(kNsPerMs);
      failed_ns = clock.now_ns();
      board.report(record_of(Error(Category::io, "broken"), rank));
      return;
    }
    RingExchange exchange(ring, board, rank, rank);
    std::vector<std::byte> memory(bytes);
    try {
      exchange.broadcast(root, memory);
      ADD_FAILURE() << "expected PEER, got no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), Category::peer);
      EXPECT_EQ(error.facts().culprit_rank, 1 - waiter);
      EXPECT_LT(clock.now_ns() - failed_ns, kNsPerSecond);
    }
  });
}

TEST(RingExchange, AFailedReaderEndsAWaitingSender) {
  // The ring has four slots, so the sender waits before it fills the first one again.
  expect_end_by_peer(0, 0, 5 * slot_bytes(2, kPageBytes));
}

TEST(RingExchange, AFailedSenderEndsAWaitingReader) {
  expect_end_by_peer(0, 1, 1);
  expect_end_by_peer(1, 0, 1);
}

// Must fail if a waiting rank sends no heartbeats: the supervisor would call that a stall.
TEST(RingExchange, AWaitingRankSendsHeartbeatsWithoutProgress) {
  SteadyClock clock;
  SharedBoard board(2, clock);
  SharedRing ring(2, kPageBytes);
  run_workers(2, [&](int rank) {
    RingExchange exchange(ring, board, rank, rank);
    std::vector<std::byte> memory(1);
    if (rank == 0) {
      while (board.last_beat_ns(1) == 0) clock.sleep_ns(kNsPerMs);
    }
    exchange.broadcast(0, memory);
  });
  EXPECT_EQ(board.progress(1), 0U);
}

TEST(ThreadExchange, DeliversAndRecordsEveryBroadcast) {
  for (int world = 1; world <= 4; ++world) {
    ScriptedBoard board(world);
    ThreadHub hub(world, 3 * kPageBytes);
    run_workers(world, [&](int rank) {
      Ledger ledger;
      ThreadExchange exchange(hub, board, rank);
      const Charge charge = exchange.commit(ledger);
      EXPECT_EQ(ledger.footprint()[Purpose::staging], 3 * kPageBytes);
      EXPECT_TRUE(all_arrive(exchange, rank, world, {0, 1, 5000}));
    });
    // Each rank takes part in the broadcasts of `world` roots, of three sizes each.
    EXPECT_EQ(hub.calls().size(), static_cast<size_t>(world * world) * 3);
    for (const ThreadHub::Call& call : hub.calls()) EXPECT_LT(call.root, world);
  }
}

TEST(ThreadExchange, AFailedPeerEndsTheWait) {
  for (const int root : {0, 1}) {
    ScriptedBoard board(2, {.fail_at_check = 100, .culprit_rank = 1});
    ThreadHub hub(2, kPageBytes);
    std::vector<std::byte> memory(4);
    EXPECT_THROW(ThreadExchange(hub, board, 0).broadcast(root, memory), Error);
    EXPECT_EQ(board.checks(), 100);
  }
}

}  // namespace
}  // namespace modicum
