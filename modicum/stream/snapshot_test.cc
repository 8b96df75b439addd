// Whatever the order of reads and overwrites, the save reads the values at the time of `charge`.
// Catches: a block is overwritten before it is read; a copy is read for another block, or freed
// before all of its bytes are read; more memory is used than charged; the window's pages are
// committed without a copy; a step waits forever, or for a save that has ended.
#include "modicum/stream/snapshot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>

namespace modicum {
namespace {

constexpr uint64_t kBlock = Snapshot::kBlockBytes;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t size, uint32_t seed) {
  Bytes bytes(size);
  std::mt19937 draw(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(draw());
  return bytes;
}

// Three tensors, and a part of the third as a fourth one; so this part is read twice.
struct Model {
  std::vector<Bytes> memory = {random_bytes(5 * kBlock + 12, 1), random_bytes(100, 2),
                               random_bytes(3 * kBlock - 4, 3)};
  std::vector<std::span<std::byte>> tensors = {memory[0], memory[1], memory[2],
                                               std::span(memory[2]).subspan(1000, kBlock)};
};

// Reads the tensor in pieces of 60 kB, in random order.
void read_all(Snapshot& snapshot, std::span<const std::byte> tensor, std::span<std::byte> to,
              uint32_t seed) {
  constexpr uint64_t kPiece = 60'000;
  std::vector<uint64_t> places((tensor.size() + kPiece - 1) / kPiece);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937(seed));
  for (const uint64_t place : places) {
    const uint64_t at = place * kPiece, n = std::min(kPiece, tensor.size() - at);
    snapshot.read({tensor.data() + at, n}, to.data() + at);
  }
}

// Overwrites the memory with zeros in pieces of 100 kB, in random order.
void overwrite_all(Snapshot& snapshot, std::span<std::byte> memory, uint32_t seed) {
  constexpr uint64_t kStretch = 100'000;
  std::vector<uint64_t> places((memory.size() + kStretch - 1) / kStretch);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937(seed));
  for (const uint64_t place : places) {
    const auto part =
        memory.subspan(place * kStretch, std::min(kStretch, memory.size() - place * kStretch));
    snapshot.before_overwrite(part);
    std::fill(part.begin(), part.end(), std::byte{0});
  }
}

TEST(Snapshot, IsReadAsItWasAtTheBeginning) {
  for (const uint64_t window : {uint64_t{0}, 2 * kBlock, 100 * kBlock}) {
    for (uint32_t seed = 0; seed < 5; ++seed) {
      SCOPED_TRACE(testing::Message() << window << " seed " << seed);
      Model model;
      const std::vector<Bytes> before = model.memory;
      Ledger ledger;
      Snapshot snapshot(window);
      for (const auto tensor : model.tensors) snapshot.cover(tensor);
      snapshot.lay_out();
      for (const auto tensor : model.tensors) snapshot.expect({tensor.data(), tensor.size()});
      snapshot.charge(ledger);
      EXPECT_EQ(ledger.footprint()[Purpose::snapshot], snapshot.bytes());
      std::vector<Bytes> read;
      for (const auto tensor : model.tensors) read.emplace_back(tensor.size());
      run_workers(4, [&](int worker) {
        if (worker < 2) {  // the save's threads
          for (size_t t = 0; t < read.size(); ++t) {
            if (t % 2 == static_cast<size_t>(worker)) {
              read_all(snapshot, model.tensors[t], read[t], seed);
            }
          }
          return;
        }
        for (size_t m = 0; m < model.memory.size(); ++m) {
          if (m % 2 == static_cast<size_t>(worker - 2)) {
            overwrite_all(snapshot, model.memory[m], seed + 10);
          }
        }
      });
      for (size_t m = 0; m < before.size(); ++m) {
        EXPECT_EQ(read[m], before[m]) << m;
        EXPECT_TRUE(std::all_of(model.memory[m].begin(), model.memory[m].end(),
                                [](std::byte b) { return b == std::byte{0}; }));
      }
      EXPECT_TRUE(std::equal(read[3].begin(), read[3].end(), before[2].begin() + 1000));
      EXPECT_EQ(ledger.peak_bytes(), snapshot.bytes()) << "more than was charged";
      EXPECT_LE(snapshot.copied_bytes(), window == 0 ? 0 : 100 * kBlock);
      snapshot.end();
      EXPECT_EQ(ledger.footprint().total(), 0U);
    }
  }
}

// If the window has room for all blocks, a step never waits, and copies each unread block once.
TEST(Snapshot, CopiesWhatIsOverwrittenFirst) {
  Bytes memory = random_bytes(3 * kBlock, 1);
  const Bytes before = memory;
  Ledger ledger;
  Snapshot snapshot(100 * kBlock);
  snapshot.cover(memory);
  snapshot.lay_out();
  const Snapshot::Pieces columns{memory.data() + 2, 2, 64,
                                 static_cast<int64_t>(memory.size()) / 64};
  snapshot.expect(columns);
  snapshot.charge(ledger);
  for (int pass = 0; pass < 2; ++pass) {
    snapshot.before_overwrite(memory);
    std::fill(memory.begin(), memory.end(), std::byte{0});
  }
  EXPECT_EQ(snapshot.copied_bytes(), memory.size());
  Bytes read(static_cast<size_t>(columns.count) * 2);
  snapshot.read(columns, read.data());
  for (size_t i = 0; i < read.size(); ++i) ASSERT_EQ(read[i], before[2 + i / 2 * 64 + i % 2]);
  EXPECT_EQ(snapshot.waited_ns(), 0);
}

uint64_t resident_bytes() {
  uint64_t mapped = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> mapped >> resident;
  return resident * kPageBytes;
}

// Catches: a window that is zeroed at `charge`, which takes as long as a write of its size.
TEST(Snapshot, TakesNoMemoryBeforeTheFirstCopy) {
  constexpr uint64_t kWindow = 64 * kMiB;
  Bytes memory = random_bytes(kWindow, 1);
  Ledger ledger;
  Snapshot snapshot(kWindow);
  snapshot.cover(memory);
  snapshot.lay_out();
  snapshot.expect({memory.data(), memory.size()});
  const uint64_t before = resident_bytes();
  snapshot.charge(ledger);
  EXPECT_GE(ledger.footprint()[Purpose::snapshot], kWindow);
  EXPECT_LT(resident_bytes(), before + kWindow / 2);
  // Not all of the memory: it may touch one block more than the window has places for, and the call
  // would wait for a reader.
  snapshot.before_overwrite(std::span(memory).first(kWindow / 4 * 3));
  EXPECT_GE(resident_bytes(), before + kWindow / 2);
}

// A step does not wait before it overwrites memory that the save does not read or has already read,
// even if the window has no room.
TEST(Snapshot, NobodyWaitsForWhatIsNotRead) {
  Bytes memory = random_bytes(4 * kBlock, 1), elsewhere(kBlock);
  Ledger ledger;
  Snapshot snapshot(0);
  snapshot.cover(memory);
  snapshot.lay_out();
  const auto first = reinterpret_cast<uintptr_t>(memory.data());
  const uint64_t block = round_up(first, kBlock) - first;  // the offset at which a block begins
  snapshot.expect({memory.data() + block, kBlock});
  snapshot.charge(ledger);
  snapshot.before_overwrite(elsewhere);
  snapshot.before_overwrite(std::span(memory).subspan(block + kBlock));
  Bytes read(kBlock);
  snapshot.read({memory.data() + block, kBlock}, read.data());
  snapshot.before_overwrite(memory);
  EXPECT_EQ(snapshot.waited_ns(), 0);
}

TEST(Snapshot, AStepWaitsUntilTheSaveReadsOrEnds) {
  for (const bool ends : {false, true}) {
    Bytes memory = random_bytes(1000, 1);
    Ledger ledger;
    Snapshot snapshot(0);
    snapshot.cover(memory);
    snapshot.lay_out();
    snapshot.expect({memory.data(), memory.size()});
    snapshot.charge(ledger);
    EXPECT_FALSE(snapshot.keep(memory));
    std::atomic<bool> is_through = false;
    std::thread step([&] {
      snapshot.before_overwrite(memory);
      is_through = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(is_through);
    Bytes read(memory.size());
    if (ends) {
      snapshot.end();
    } else {
      snapshot.read({memory.data(), memory.size()}, read.data());
    }
    step.join();
    EXPECT_GE(snapshot.waited_ns(), 10 * kNsPerMs);
    EXPECT_EQ(read == memory, !ends);
  }
}

}  // namespace
}  // namespace modicum
