// Catches: a load with the wrong rank, sink or board that writes outside of a buffer or to another
// rank's shards, or that ends without a line that names the fault.
#include <gtest/gtest.h>

#include "modicum/base/error_double.h"
#include "modicum/io/file_doubles.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

class OutsideThePlan : public testing::Test {
 protected:
  OutsideThePlan() {
    files_.make_directory("/m");
    const std::vector<TensorSpec> specs = {{"w", Role::param, DType::f32, {4, 2}}};
    SafetensorsWriter(files_, "/m/model.safetensors", specs).finish();
    checkpoint_ = open_checkpoint(files_, "/m");
    recipe_ = identity_recipe(checkpoint_.manifest);
  }

  Plan plan(std::string_view strategy) const {
    return make_plan(checkpoint_.manifest, recipe_, fsdp2_layout(2),
                     {.strategy = &strategy_named(strategy)});
  }
  // The message of the USAGE error that `call` throws.
  template <typename Call>
  static std::string refusal(const Call& call) {
    const auto error = error_of(call);
    if (!error) return "";
    EXPECT_EQ(error->category(), Category::usage);
    return error->what();
  }

  MemoryFileSystem files_;
  SteadyClock clock_;
  SharedBoard board_{2, clock_};
  Ledger ledger_;
  Checkpoint checkpoint_;
  Recipe recipe_;
};

// A launcher may number its ranks from 1.
TEST_F(OutsideThePlan, ARankIsRefused) {
  const Plan loaded = plan("own-shard");
  HostSink first(loaded, 0, ledger_);
  const SavePlan saved(checkpoint_, loaded);
  ChunkSums sums(saved.manifest(), 7);
  for (const int rank : {-1, 2, 7, 1000}) {
    const RankContext at{.rank = rank, .board = &board_, .ledger = &ledger_};
    const std::string outside =
        "USAGE: a rank is out of range (expected 0 to 1, got " + std::to_string(rank) + ")";
    EXPECT_EQ(refusal([&] { HostSink(loaded, rank, ledger_); }), outside);
    EXPECT_EQ(refusal([&] { load(checkpoint_, loaded, at, first); }), outside);
    EXPECT_EQ(refusal([&] {
                save({checkpoint_, saved, at, first}, {files_, "/m"}, sums);
              }),
              outside);
    EXPECT_EQ(refusal([&] { DigestSum(loaded, rank); }), outside);
    EXPECT_EQ(refusal([&] {
                create_files(saved.manifest(), {files_, "/m"}, board_, {rank, 2});
              }),
              outside);
  }
}

TEST_F(OutsideThePlan, TheShardsOfAnotherRankAreRefused) {
  const Plan loaded = plan("own-shard");
  HostSink first(loaded, 0, ledger_);
  const SavePlan saved(checkpoint_, loaded);
  ChunkSums sums(saved.manifest(), 7);
  const RankContext at{.rank = 1, .board = &board_, .ledger = &ledger_};
  const std::string message =
      "USAGE: the sink holds the shards of another rank (expected rank 0, got 1)";
  const std::string dump = "/m/dump";
  const auto expected = [](uint32_t, int64_t, int64_t, std::span<std::byte>) {};
  EXPECT_EQ(refusal([&] { load(checkpoint_, loaded, at, first); }), message);
  EXPECT_EQ(refusal([&] { save({checkpoint_, saved, at, first}, {files_, "/m"}, sums); }), message);
  EXPECT_EQ(refusal([&] { check_values(loaded, 1, first, expected); }), message);
  EXPECT_EQ(refusal([&] { digest_of_rank(loaded, 1, first); }), message);
  EXPECT_EQ(refusal([&] { dump_rank(loaded, 1, first, {files_, dump}); }), message);
  EXPECT_FALSE(files_.exists(dump));
}

TEST_F(OutsideThePlan, AContextThatLacksAPartIsRefused) {
  const Plan loaded = plan("own-shard"), exchanging = plan("rank0-broadcast");
  HostSink first(loaded, 0, ledger_);
  SharedBoard small(1, clock_);
  const auto refused = [&](const Plan& planned, const RankContext& at) {
    return refusal([&] { load(checkpoint_, planned, at, first); });
  };
  EXPECT_EQ(refused(loaded, {0, &small, nullptr, &ledger_}),
            "USAGE: the board has fewer ranks than the plan (rank 0, expected 2 or more, got 1)");
  EXPECT_EQ(refused(loaded, {0, nullptr, nullptr, &ledger_}), "USAGE: RankContext::board is null");
  EXPECT_EQ(refused(loaded, {0, &board_, nullptr, nullptr}), "USAGE: RankContext::ledger is null");
  EXPECT_EQ(refused(exchanging, {0, &board_, nullptr, &ledger_}),
            "USAGE: RankContext::exchange is null, and the plan's ranks exchange bytes");
}

TEST_F(OutsideThePlan, ABufferOrAFileIsRefused) {
  const Plan loaded = plan("own-shard");
  HostSink first(loaded, 0, ledger_);
  EXPECT_EQ(first.host(0).size(), 16U);
  EXPECT_EQ(refusal([&] { first.host(9999); }),
            "USAGE: the index of a local buffer is out of range (expected < 1, got 9999)");
  EXPECT_EQ(refusal([&] { DigestSum(loaded, 0).add(1, 0, {}); }),
            "USAGE: the index of a local buffer is out of range (expected < 1, got 1)");
  const std::string of_file = "USAGE: the index of a file is out of range (expected < 1, got 1)";
  EXPECT_EQ(refusal([&] { open_data_file(checkpoint_, 1); }), of_file);
  EXPECT_EQ(refusal([&] { create_file(checkpoint_.manifest, 1, {files_, "/m"}); }), of_file);
}

}  // namespace
}  // namespace modicum
