// load() with several ranks, over the test doubles of Exchange and Board.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/plan/traffic_double.h"
#include "modicum/ranks/board_double.h"
#include "modicum/ranks/exchange_double.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

// An opened checkpoint in memory with tensors of uneven sizes.
struct Model {
  Model() {
    files.make_directory("/m");
    std::vector<TensorSpec> specs;
    for (int64_t n = 0; n < 12; ++n) {
      specs.push_back({"t" + std::to_string(n), Role::param, DType::bf16, {n, 7}});
    }
    specs.push_back({"wide", Role::param, DType::bf16, {64, 900}});
    specs.push_back({"scalar", Role::param, DType::f32, {}});
    SafetensorsWriter out(files, "/m/model.safetensors", specs);
    for (size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(bytes_of(specs[i].dtype, numel_of(specs[i].shape)));
      synth_fill(name_hash(specs[i].fqn), specs[i].dtype, 0, numel_of(specs[i].shape),
                 bytes.data());
      out.write(i, 0, bytes);
    }
    out.finish();
    checkpoint = open_checkpoint(files, "/m");
    recipe = identity_recipe(checkpoint.manifest);
  }

  Plan plan(std::string_view strategy, int world) const {
    return make_plan(checkpoint.manifest, recipe, fsdp2_layout(world),
                     {.strategy = &strategy_named(strategy), .staging_bytes = kMinStagingBytes});
  }

  MemoryFileSystem files;
  Checkpoint checkpoint;
  Recipe recipe;
};

struct LoadedRank {
  std::vector<std::vector<std::byte>> buffers;  // empty if the rank failed
  LoadOutcome outcome;
  std::optional<Error> failure;
  Footprint after;  // held after the sink was destroyed
};

using MakeExchange = std::function<std::unique_ptr<Exchange>(int rank)>;

std::vector<LoadedRank> load_all(const Model& model, const Plan& plan, Board& board,
                                 const MakeExchange& make_exchange) {
  std::vector<LoadedRank> loaded(static_cast<size_t>(plan.ranks()));
  run_workers(plan.ranks(), [&](int rank) {
    LoadedRank& mine = loaded[static_cast<size_t>(rank)];
    Ledger ledger;
    try {
      const auto exchange = make_exchange(rank);
      HostSink sink(plan, rank, ledger);
      sink.poison();
      mine.outcome = load(model.checkpoint, plan, {rank, &board, exchange.get(), &ledger}, sink);
      for (uint32_t t = 0; t < plan.recipe->targets.size(); ++t) {
        mine.buffers.emplace_back(sink.host(t).begin(), sink.host(t).end());
      }
    } catch (const Error& error) {
      mine.failure = error;
    }
    mine.after = ledger.footprint();
  });
  return loaded;
}

// Loads with a ThreadExchange for each rank. `calls`, if set, receives the calls of broadcast.
std::vector<LoadedRank> load_scripted(const Model& model, const Plan& plan, Board& board,
                                      std::vector<ThreadHub::Call>* calls = nullptr) {
  ThreadHub hub(plan.ranks(), plan.staging.ring_part_bytes);
  auto loaded = load_all(model, plan, board, [&](int rank) -> std::unique_ptr<Exchange> {
    return std::make_unique<ThreadExchange>(hub, board, rank);
  });
  if (calls != nullptr) *calls = hub.calls();
  return loaded;
}

TEST(LoadAmongPeers, AnyExchangeGivesTheSameBytes) {
  const Model model;
  for (const int world : {2, 3, 5}) {
    const Plan plan = model.plan("rank0-broadcast", world);
    SteadyClock clock;
    SharedBoard shared(world, clock);
    SharedRing ring(world, plan.staging.ring_part_bytes);
    const auto by_ring = load_all(model, plan, shared, [&](int rank) -> std::unique_ptr<Exchange> {
      return std::make_unique<RingExchange>(ring, shared, rank, rank);
    });
    ScriptedBoard board(world);
    std::vector<ThreadHub::Call> calls;
    const auto by_double = load_scripted(model, plan, board, &calls);
    for (size_t rank = 0; rank < by_ring.size(); ++rank) {
      ASSERT_FALSE(by_ring[rank].failure || by_double[rank].failure);
      EXPECT_FALSE(by_ring[rank].buffers.empty());
      EXPECT_EQ(by_ring[rank].buffers, by_double[rank].buffers);
    }
    uint64_t received = 0;
    for (const ThreadHub::Call& call : calls) {
      EXPECT_EQ(call.root, 0);
      if (call.rank != 0) received += call.bytes;
    }
    EXPECT_EQ(calls.size(), model.checkpoint.manifest.tensors.size() * by_ring.size());
    EXPECT_EQ(received, traffic(plan).exchanged_bytes);
  }
}

TEST(LoadAmongPeers, HeartbeatsAddUpToTheBytesReadOrReceived) {
  const Model model;
  for (const Strategy& strategy : strategies()) {
    for (const int world : {1, 3}) {
      const Plan plan = model.plan(strategy.name, world);
      ScriptedBoard board(world);
      // One hub for all ranks suffices: they all exchange with each other, or none does.
      const auto loaded = load_scripted(model, plan, board);
      for (int rank = 0; rank < world; ++rank) {
        const Traffic due = traffic_of_rank(plan, rank);
        EXPECT_FALSE(loaded[static_cast<size_t>(rank)].failure);
        EXPECT_EQ(board.bytes_of_rank(rank), due.storage_read_bytes + due.exchanged_bytes)
            << strategy.name << " rank " << rank;
      }
    }
  }
}

void expect_peer(const LoadedRank& loaded) {
  ASSERT_TRUE(loaded.failure.has_value());
  EXPECT_EQ(loaded.failure->category(), Category::peer) << loaded.failure->what();
  EXPECT_EQ(loaded.failure->facts().culprit_rank, BoardScript{}.culprit_rank);
  EXPECT_EQ(loaded.after, Footprint{});
}

// Another rank fails before the n-th poll of the board, for every n; the load stops.
TEST(LoadAmongPeers, APeersFailureBeforeTheNthPollEndsTheLoad) {
  const Model model;
  for (const Strategy& strategy : strategies()) {
    const Plan plan = model.plan(strategy.name, 1);
    for (int64_t n = 1;; ++n) {
      ScriptedBoard board(1, {.fail_at_check = n});
      const LoadedRank loaded = load_scripted(model, plan, board)[0];
      EXPECT_EQ(loaded.after, Footprint{});
      if (board.checks() < n) {
        EXPECT_FALSE(loaded.failure.has_value());
        EXPECT_GT(n, 1);
        break;
      }
      expect_peer(loaded);
    }
  }
}

// Another rank fails at the n-th heartbeat. After the last heartbeat nothing is left to cancel.
TEST(LoadAmongPeers, APeersFailureAtTheNthHeartbeatEndsTheLoad) {
  const Model model;
  const Plan plan = model.plan("own-shard", 1);
  ScriptedBoard whole(1);
  const auto due = load_scripted(model, plan, whole)[0].buffers;
  const auto beats = static_cast<int64_t>(whole.beats().size());
  EXPECT_GE(beats, 2);
  for (int64_t n = 1; n <= beats; ++n) {
    ScriptedBoard board(1, {.fail_at_beat = n});
    const LoadedRank loaded = load_scripted(model, plan, board)[0];
    if (n < beats) {
      expect_peer(loaded);
      EXPECT_EQ(static_cast<int64_t>(board.beats().size()), n) << "nothing more was read";
    } else {
      EXPECT_EQ(loaded.buffers, due);
      EXPECT_EQ(loaded.after, Footprint{});
    }
  }
}

TEST(LoadAmongPeers, ARankWaitingForAFailedPeerStops) {
  const Model model;
  for (int64_t n = 1; n <= 8; ++n) {
    const Plan plan = model.plan("rank0-broadcast", 2);
    ScriptedBoard board(2, {.fail_at_beat = n});
    const auto loaded = load_scripted(model, plan, board);
    // Rank 0 may succeed, if it has sent everything before the n-th heartbeat. Rank 1 always has
    // more to receive, so it fails.
    for (const LoadedRank& rank : loaded) {
      EXPECT_EQ(rank.after, Footprint{});
      if (!rank.failure) continue;
      EXPECT_EQ(rank.failure->category(), Category::peer);
    }
    expect_peer(loaded[1]);
  }
}

}  // namespace
}  // namespace modicum
