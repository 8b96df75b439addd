// The walk: follows two parameters from their places in a file to a rank's shards. Compares the
// numbers of the modules on the way (checkpoint, recipe, layout, plan, memory, stream) with numbers
// computed by hand. Under FSDP2 with 4 ranks a rank has 2 elements of `a` and up to 3 rows of `w`:
//
//   tensor          a [8]      w [10, 6], both bf16
//   bytes of data   |   16   |  36  |  36  |  36  | 12 |
//   held by rank     0 to 3     0      1      2     3
#include <gtest/gtest.h>

#include <cstring>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

// Catches: a module that passes a wrong number on to the next one.
TEST(Walk, AParameterFromItsFileToTheLastRank) {
  MemoryFileSystem files;
  files.make_directory("/m");
  const std::vector<TensorSpec> specs = {{"a", Role::param, DType::bf16, {8}},
                                         {"w", Role::param, DType::bf16, {10, 6}}};
  std::vector<std::byte> values(120);
  synth_fill(name_hash("w"), DType::bf16, 0, 60, values.data());
  SafetensorsWriter out(files, "/m/model.safetensors", specs);
  out.write(0, 0, std::vector<std::byte>(16));
  out.write(1, 0, values);
  out.finish();

  // checkpoint: the header is 8 bytes of length, then JSON, padded to a multiple of 8 bytes.
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  const uint64_t data = checkpoint.manifest.files[0].header_bytes;
  EXPECT_EQ(data % 8, 0U);
  EXPECT_EQ(checkpoint.manifest.tensors[1].at, (Extent{0, data + 16, data + 136}));

  // recipe: identity.
  const Recipe recipe = make_recipe(checkpoint.manifest);
  ASSERT_EQ(recipe.targets.size(), 2U);
  EXPECT_EQ(recipe.targets[1].spec, specs[1]);
  EXPECT_EQ(recipe.nodes[recipe.targets[1].root].op, Op::stored);

  // layout: rows 3..5 for rank 1; row 9 and two rows of padding for rank 3.
  const Layout layout = fsdp2_layout(4);
  EXPECT_EQ(local_shape(layout.kinds[0], specs[1], 1), (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(local_buffer(layout.kinds[0], specs[1], 3).numel, 6);
  EXPECT_EQ(local_buffer(layout.kinds[0], specs[1], 3).padded_numel, 18);

  // plan: the transfers of rank 3 and its reads.
  const Plan plan =
      make_plan(checkpoint.manifest, recipe, layout, {.strategy = &strategy_named("own-shard")});
  std::vector<Transfer> transfers;
  const auto add = [&](const Transfer& t) { transfers.push_back(t); };
  for_each_stored_transfer(plan, 3, add);
  for_each_made_transfer(plan, 3, add);
  // The last two elements of a, the last row of w, and the padding of w.
  ASSERT_EQ(transfers.size(), 3U);
  EXPECT_EQ(transfers[0].runs.first, 6);
  EXPECT_EQ(transfers[1].runs.first, 54);
  EXPECT_EQ(transfers[1].runs.length, 6);
  EXPECT_EQ(transfers[1].runs.at, 0);
  EXPECT_EQ(transfers[2].source, Transfer::Source::zero);
  EXPECT_EQ(transfers[2].runs.at, 6);
  EXPECT_EQ(transfers[2].runs.length, 12);
  std::vector<Extent> reads;
  std::vector<Transfer> table(kReadTableRows);
  for_each_read(plan, 3, table, [&](const Read& r) { reads.push_back(r.at); });
  EXPECT_EQ(reads, (std::vector<Extent>{{0, data + 12, data + 16}, {0, data + 124, data + 136}}));

  // promise: rank 3 holds 4 bytes of a at 0 and, with padding, 36 bytes of w at 64, together one
  // page of shards. Staging and the process's baseline have their default sizes.
  const Footprint& promised = plan.promise.phases[kLoadPhase].of_rank[3];
  EXPECT_EQ(promised[Purpose::shards], 4096U);
  EXPECT_EQ(promised[Purpose::staging], 8 * kMiB);
  EXPECT_EQ(promised[Purpose::window], 0U);
  EXPECT_EQ(promised[Purpose::process], 2 * kMiB);

  // load: all ranks, each with its ledger; rank 3 holds the last row and two rows of zeros.
  SteadyClock clock;
  SharedBoard board(4, clock);
  run_workers(4, [&](int rank) {
    Ledger ledger(plan.promise.ledger_limit_bytes(rank));
    HostSink shards(plan, rank, ledger);
    const LoadOutcome outcome = load(checkpoint, plan, {rank, &board, nullptr, &ledger}, shards);
    EXPECT_EQ(ledger.peak_bytes(), plan.promise.ledger_limit_bytes(rank));
    EXPECT_EQ(outcome.storage_read_bytes, rank == 3 ? 4U + 12 : 4U + 36);
    EXPECT_EQ(outcome.bytes_loaded, outcome.storage_read_bytes);
    const auto shard = shards.host(1);
    ASSERT_EQ(shard.size(), 36U);
    const size_t loaded_bytes = rank == 3 ? 12 : 36;
    EXPECT_EQ(std::memcmp(shard.data(), values.data() + 36 * rank, loaded_bytes), 0);
    for (size_t i = loaded_bytes; i < shard.size(); ++i) EXPECT_EQ(shard[i], std::byte{0});
  });
}

}  // namespace
}  // namespace modicum
