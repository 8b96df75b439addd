// Targets with different destinations in one load, and caller-provided tensors.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "modicum/io/file_doubles.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

// Types that borrow a plan or a checkpoint can't be constructed from a temporary.
static_assert(std::is_constructible_v<HostSink, Plan&, int, Ledger&>);
static_assert(!std::is_constructible_v<HostSink, Plan, int, Ledger&>);
static_assert(std::is_constructible_v<DigestSum, Plan&, int>);
static_assert(!std::is_constructible_v<DigestSum, Plan, int>);
static_assert(std::is_constructible_v<Rings, Plan&>);
static_assert(!std::is_constructible_v<Rings, Plan>);

constexpr int64_t kRows = 7;
constexpr int64_t kColumns = 5;

// Three stored tensors and one caller-provided tensor, over two ranks.
struct World {
  MemoryFileSystem files;
  Checkpoint checkpoint;
  Recipe recipe;
  std::vector<float> init_values = std::vector<float>(kRows * kColumns);
  std::vector<std::thread::id> asked;  // the thread of each call of LoadOptions::caller

  World() {
    std::vector<TensorSpec> specs;
    for (const char* name : {"device", "given", "ours"}) {
      specs.push_back({name, Role::param, DType::f32, {kRows, kColumns}});
    }
    SafetensorsWriter writer(files, "/m.safetensors", specs);
    for (size_t t = 0; t < specs.size(); ++t) {
      std::vector<float> values(kRows * kColumns);
      std::iota(values.begin(), values.end(), 100.F * static_cast<float>(t));
      writer.write(t, 0, std::as_bytes(std::span(values)));
    }
    writer.finish();
    checkpoint = open_checkpoint(files, "/m.safetensors");
    RecipeBuilder builder(checkpoint.manifest);
    for (const char* name : {"device", "given", "ours"}) builder.target(name, builder.stored(name));
    builder.target("made", builder.caller(0, {kRows, kColumns}, DType::f32));
    recipe = builder.finish();
    std::iota(init_values.begin(), init_values.end(), 1000.F);
  }

  Plan plan(const char* strategy) const {
    return make_plan(checkpoint.manifest, recipe, fsdp2_layout(2),
                     {.strategy = &strategy_named(strategy),
                      .destination_of = {Destination::copy, Destination::caller_memory,
                                         Destination::cpu, Destination::cpu},
                      .staging_bytes = 8 * kMiB,  // a slot for each worker
                      .init_bytes = init_values.size() * sizeof(float)});
  }

  LoadOptions options() {
    return {.threads = 3, .caller = [this](uint32_t ordinal) {
              EXPECT_EQ(ordinal, 0U);
              asked.push_back(std::this_thread::get_id());
              return std::as_bytes(std::span(init_values));
            }};
  }
};

// A board on which no rank ever fails.
class AloneBoard final : public Board {
 public:
  void beat(int, uint64_t) noexcept override {}
  bool report(const ErrorRecord&) noexcept override { return true; }
  std::optional<ErrorRecord> failure() const override { return std::nullopt; }
  void barrier(int) override {}
  void agree(int, const Digest&) override {}
};

// A rank's shard of seven rows under FSDP2's Shard(0) over two ranks: four rows, or three rows and
// one of padding.
std::vector<float> rows_of(int rank, float first) {
  std::vector<float> rows(4 * kColumns);
  for (int64_t i = 0; i < 4 * kColumns; ++i) {
    const int64_t global = rank * 4 * kColumns + i;
    rows[static_cast<size_t>(i)] =
        global < kRows * kColumns ? first + static_cast<float>(global) : 0;
  }
  return rows;
}

std::vector<float> floats(std::span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Catches: host memory for a target that is copied to a device or whose memory the caller provides;
// a call of LoadOptions::caller on another thread than the one that called load().
TEST(Places, EachTargetGoesToItsOwnDestination) {
  for (const char* strategy : {"own-shard", "full-per-rank"}) {
    for (int rank = 0; rank < 2; ++rank) {
      World world;
      const Plan plan = world.plan(strategy);
      AloneBoard board;
      Ledger ledger(plan.promise.ledger_limit_bytes(rank));
      std::vector<std::byte> caller_memory(4 * kColumns * sizeof(float));
      std::vector<std::byte> device(caller_memory.size());
      const HostSink::Copy copy = [&](uint32_t buffer, int64_t at, auto elements) {
        EXPECT_EQ(buffer, 0U);
        std::memcpy(device.data() + at * 4, elements.data(), elements.size());
      };
      HostSink sink(plan, rank, ledger, {{}, caller_memory}, copy);
      sink.poison();
      EXPECT_TRUE(sink.host(0).empty());
      EXPECT_EQ(sink.host(1).data(), caller_memory.data());
      const LoadOptions options = world.options();
      load(world.checkpoint, plan, {rank, &board, nullptr, &ledger}, sink, options);
      EXPECT_EQ(floats(device), rows_of(rank, 0)) << strategy << rank;
      EXPECT_EQ(floats(caller_memory), rows_of(rank, 100)) << strategy << rank;
      EXPECT_EQ(floats(sink.host(2)), rows_of(rank, 200)) << strategy << rank;
      EXPECT_EQ(floats(sink.host(3)), rows_of(rank, 1000)) << strategy << rank;
      ASSERT_FALSE(world.asked.empty());
      for (const auto thread : world.asked) EXPECT_EQ(thread, std::this_thread::get_id());
      // Two of four targets are in the arena: 80 bytes each, the second one on a 64-byte boundary.
      EXPECT_EQ(arena_begins(plan, rank), (std::vector<uint64_t>{0, 0, 0, 128, 208}));
      EXPECT_EQ(ledger.footprint()[Purpose::shards], kPageBytes);
      EXPECT_EQ(sink.release().bytes().size(), kPageBytes);
    }
  }
}

TEST(Places, GivenMemoryOfAnotherSizeIsRefusedByName) {
  const World world;
  const Plan plan = world.plan("own-shard");
  Ledger ledger;
  std::vector<std::byte> caller_memory(4 * kColumns * sizeof(float) - 1);
  try {
    const HostSink sink(plan, 0, ledger, {{}, caller_memory});
    FAIL() << "expected USAGE, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_EQ(error.facts().tensor, "given");
    EXPECT_EQ(error.facts().expected, "80 bytes");
  }
}

TEST(Places, CallerProvidedTensorsArePromised) {
  const World world;
  const Plan plan = world.plan("own-shard");
  EXPECT_EQ(plan.promise.phases[kLoadPhase].of_rank[1][Purpose::init], kRows * kColumns * 4U);
  EXPECT_EQ(plan.promise.phases[kHoldPhase].of_rank[1][Purpose::init], 0U);
}

size_t pages_in_memory(std::span<std::byte> bytes) {
  std::vector<unsigned char> pages(bytes.size() / kPageBytes);
  EXPECT_EQ(mincore(bytes.data(), bytes.size(), pages.data()), 0);
  return static_cast<size_t>(std::ranges::count_if(pages, [](auto page) { return page & 1; }));
}

// A recipe with one target, which is initialised with zeros.
Recipe recipe_of_zeros(const World& world, int64_t elements) {
  RecipeBuilder builder(world.checkpoint.manifest);
  builder.target("zeros", builder.init(InitRule::zeros, 0, {elements}, DType::f32));
  for (const char* name : {"device", "given", "ours"}) builder.unused(name);
  return builder.finish();
}

Plan plan_alone(const World& world, const Recipe& recipe) {
  return make_plan(world.checkpoint.manifest, recipe, fsdp2_layout(1),
                   {.strategy = &strategy_named("own-shard"), .staging_bytes = kMiB});
}

// Catches: pages that are committed, and so zeroed by the kernel, long before they are filled. They
// have then left the CPU's cache when the data arrives.
TEST(HostSink, TouchesPagesOnlyAsTheyAreFilled) {
  World world;
  const Recipe recipe = recipe_of_zeros(world, kMiB);
  const Plan plan = plan_alone(world, recipe);
  AloneBoard board;
  Ledger ledger(plan.promise.ledger_limit_bytes(0));
  HostSink sink(plan, 0, ledger);
  EXPECT_EQ(ledger.footprint()[Purpose::shards], 4 * kMiB);
  EXPECT_EQ(pages_in_memory(sink.host(0)), 0U);
  load(world.checkpoint, plan, {0, &board, nullptr, &ledger}, sink);
  EXPECT_EQ(pages_in_memory(sink.host(0)), 4 * kMiB / kPageBytes);
}

// Catches: a call of poison() that can't be cancelled. It touches all pages of the arena, which can
// take longer than the load.
TEST(HostSink, PoisoningCanBeCancelled) {
  const World world;
  const Recipe recipe = recipe_of_zeros(world, 10 * kMiB);
  const Plan plan = plan_alone(world, recipe);  // 40 MiB
  Ledger ledger;
  HostSink sink(plan, 0, ledger);
  struct StopRequest {};
  int polls = 0;
  const auto poll = [&polls] {
    if (++polls == 3) throw StopRequest{};
  };
  EXPECT_THROW(sink.poison(poll), StopRequest);
  EXPECT_EQ(pages_in_memory(sink.host(0)), 32 * kMiB / kPageBytes)
      << "expected 16 MiB after each of the two polls that did not throw";
}

}  // namespace
}  // namespace modicum
