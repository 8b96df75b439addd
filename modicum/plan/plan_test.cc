#include "modicum/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "modicum/plan/traffic_double.h"

namespace modicum {
namespace {

constexpr uint64_t kHeaderBytes = 808;

TensorSpec spec(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {std::move(name), Role::param, dtype, std::move(shape)};
}

// The manifest of a checkpoint with these tensors, `per_file` in each file.
Manifest manifest_of(const std::vector<TensorSpec>& specs, size_t per_file = SIZE_MAX) {
  Manifest manifest;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (i % per_file == 0) {
      manifest.files.push_back({"model-" + std::to_string(i / per_file) + ".safetensors"});
      manifest.files.back().header_bytes = kHeaderBytes;
      manifest.files.back().identity.size_bytes = kHeaderBytes;
    }
    uint64_t& end = manifest.files.back().identity.size_bytes;
    const uint64_t bytes = bytes_of(specs[i].dtype, numel_of(specs[i].shape));
    const auto file = static_cast<uint32_t>(manifest.files.size() - 1);
    manifest.tensors.push_back({specs[i], {file, end, end + bytes}});
    end += bytes;
  }
  manifest.identity = {1, 2};
  return manifest;
}

PlanOptions options_of(std::string_view strategy, uint64_t staging_bytes = kMinStagingBytes) {
  return {.strategy = &strategy_named(strategy), .staging_bytes = staging_bytes};
}

std::optional<Error> failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// --- a plan borrows its inputs ---

template <typename M, typename R>
concept CanBePlanned = requires(M&& manifest, R&& recipe) {
  make_plan(std::forward<M>(manifest), std::forward<R>(recipe), whole_layout(1), PlanOptions{});
};
static_assert(CanBePlanned<Manifest&, const Recipe&>);
static_assert(!CanBePlanned<Manifest, Recipe&>, "a plan would outlive its manifest");
static_assert(!CanBePlanned<Manifest&, Recipe>, "a plan would outlive its recipe");
static_assert(!CanBePlanned<Manifest, Recipe>);
static_assert(std::is_constructible_v<RankWindow, Plan&, int>);
static_assert(!std::is_constructible_v<RankWindow, Plan, int>);

// --- every element, compared one by one ---

// The source of the element at one place of a local buffer.
struct Origin {
  Transfer::Source source = Transfer::Source::zero;
  uint32_t from = 0;  // stored: index in the manifest
  int64_t element = 0;

  bool operator==(const Origin&) const = default;
};
using Origins = std::map<std::pair<uint32_t, int64_t>, Origin>;  // key: buffer and place

// Fails if a place is written twice.
void add_elements(Origins& origins, const Transfer& t) {
  for (int64_t k = 0; k < t.runs.count; ++k) {
    for (int64_t i = 0; i < t.runs.length; ++i) {
      const int64_t place = t.runs.at + k * t.runs.at_stride + i * t.runs.at_step;
      const bool stored = t.source == Transfer::Source::stored;
      const bool zero = t.source == Transfer::Source::zero;
      const Origin origin{t.source, stored ? t.from : 0,
                          zero ? 0 : t.runs.first + k * t.runs.stride + i};
      const bool fresh = origins.emplace(std::pair(t.buffer, place), origin).second;
      ASSERT_TRUE(fresh) << "place " << place << " of buffer " << t.buffer << " is written twice";
    }
  }
}

// Adds the elements that a rank must hold by torch's rule: Shard(dim) makes chunks of
// ceil(size / world). The expected source of each element is that of element_source.
void add_expected(Origins& expected, const Plan& plan, uint32_t target, int dim, int rank) {
  const TensorSpec& target_spec = plan.recipe->targets[target].spec;
  const int world = plan.ranks();
  std::vector<int64_t> local = target_spec.shape;
  int64_t first = 0;
  const auto cut = static_cast<size_t>(dim < static_cast<int>(target_spec.shape.size()) ? dim : 0);
  int64_t padded = 1;
  for (size_t d = 0; d < target_spec.shape.size(); ++d) {
    const int64_t chunk = (target_spec.shape[d] + world - 1) / world;
    if (d == cut) {
      first = std::min(target_spec.shape[d], rank * chunk);
      local[d] = std::min(chunk, target_spec.shape[d] - first);
    }
    padded *= d == cut && d == 0 && plan.layout.kinds[0].cuts[0].pads ? chunk : local[d];
  }
  for (int64_t place = 0; place < padded; ++place) {
    if (place >= numel_of(local)) {
      expected[{target, place}] = Origin{};
      continue;
    }
    int64_t rest = place, global = 0, stride = 1;
    for (size_t d = target_spec.shape.size(); d-- > 0;) {
      global += (rest % local[d] + (d == cut ? first : 0)) * stride;
      rest /= local[d];
      stride *= target_spec.shape[d];
    }
    const ElementSource source =
        element_source(*plan.recipe, plan.recipe->targets[target].root, global);
    const bool stored = source.leaf->op == Op::stored;
    expected[{target, place}] = {stored ? Transfer::Source::stored : Transfer::Source::init,
                                 stored ? source.leaf->from : 0, source.first};
  }
}

// A read stays inside its file's data, and begins and ends with the bytes of its transfers. A
// direct read is one run; any other fits the tile.
void check_read(const Plan& plan, const Read& read) {
  const DataFile& file = plan.manifest->files[read.at.file];
  ASSERT_LT(read.at.begin, read.at.end);
  ASSERT_GE(read.at.begin, file.header_bytes);
  ASSERT_LE(read.at.end, file.identity.size_bytes);
  if (read.direct) {
    ASSERT_EQ(plan.options.destination, Destination::cpu);
    ASSERT_EQ(read.transfers.size(), 1U);
    const Transfer& only = read.transfers[0];
    ASSERT_FALSE(only.casts());
    ASSERT_EQ(only.runs.count, 1);
    ASSERT_TRUE(only.runs.at_step == 1 || only.runs.length == 1);
    ASSERT_EQ(read.at.end - read.at.begin, bytes_of(only.from_dtype, only.numel()));
  } else {
    ASSERT_LE(read.at.end - read.at.begin, plan.staging.tile_bytes);
  }
  uint64_t first = UINT64_MAX, last = 0;
  for (const Transfer& t : read.transfers) {
    for (int64_t k = 0; k < t.runs.count; ++k) {
      const Extent extent = extent_of(plan.manifest->tensors[t.from],
                                      t.runs.first + k * t.runs.stride, t.runs.length);
      ASSERT_EQ(extent.file, read.at.file);
      first = std::min(first, extent.begin);
      last = std::max(last, extent.end);
    }
  }
  ASSERT_EQ(first, read.at.begin);
  ASSERT_EQ(last, read.at.end);
}

// Catches: a transfer that is omitted, repeated, shifted or from the wrong place; a read one byte
// too long.
void expect_tiled(const Plan& plan, int dim) {
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << plan.ranks());
    Origins expected, in_transfers, in_reads, in_parts;
    for (const uint32_t t : plan.order) add_expected(expected, plan, t, dim, rank);
    const auto add_made = [&](const Transfer& t) {
      ASSERT_NE(t.source, Transfer::Source::stored);
      add_elements(in_transfers, t);
      add_elements(in_reads, t);
    };
    for_each_stored_transfer(plan, rank, [&](const Transfer& t) {
      ASSERT_EQ(t.source, Transfer::Source::stored);
      add_elements(in_transfers, t);
    });
    for_each_made_transfer(plan, rank, add_made);
    ASSERT_EQ(in_transfers, expected);
    std::vector<Transfer> table(kReadTableRows);
    for_each_read(plan, rank, table, [&](const Read& read) {
      check_read(plan, read);
      for (const Transfer& t : read.transfers) add_elements(in_reads, t);
    });
    ASSERT_EQ(in_reads, expected);
    // for_each_transfer_from must generate the same transfers.
    for (uint32_t s = 0; s < plan.manifest->tensors.size(); ++s) {
      for_each_transfer_from(plan, rank, s, [&](const Transfer& t) {
        ASSERT_EQ(t.from, s);
        add_elements(in_parts, t);
      });
    }
    std::erase_if(expected,
                  [](const auto& row) { return row.second.source != Transfer::Source::stored; });
    ASSERT_EQ(in_parts, expected);
  }
}

void expect_grid(const Manifest& manifest, const Recipe& recipe) {
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const int dim : {0, 1}) {
      for (const Destination destination : {Destination::cpu, Destination::copy}) {
        PlanOptions options = options_of("own-shard");
        options.destination = destination;
        expect_tiled(make_plan(manifest, recipe, fsdp2_layout(world, dim), options), dim);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Transfers, TileEveryBufferWithoutARecipe) {
  std::vector<TensorSpec> specs = {spec("scalar", DType::bf16, {}), spec("i", DType::i64, {7})};
  for (int64_t n = 0; n <= 17; ++n) {
    specs.push_back(spec("v" + std::to_string(n), DType::bf16, {n}));
    specs.push_back(spec("m" + std::to_string(n), DType::f32, {n, 3}));
    specs.push_back(spec("t" + std::to_string(n), DType::bf16, {3, n, 2}));
  }
  const Manifest manifest = manifest_of(specs, 20);
  Recipe recipe = identity_recipe(manifest);
  expect_grid(manifest, recipe);
  set_dtype(recipe, DType::f32, "");
  expect_grid(manifest, recipe);
}

TEST(Transfers, TileEveryBufferOfARecipe) {
  std::vector<TensorSpec> specs;
  for (const char* name : {"gate", "up", "down"}) {
    for (int e = 0; e < 5; ++e) {
      specs.push_back(spec(std::to_string(e) + name, DType::bf16, {3, 6}));
    }
  }
  specs.push_back(spec("qkv", DType::bf16, {12, 4}));
  const Manifest manifest = manifest_of(specs, 7);
  RecipeBuilder b(manifest);
  const auto stack = [&](const std::string& name) {
    std::vector<uint32_t> experts;
    for (int e = 0; e < 5; ++e) experts.push_back(b.stored(std::to_string(e) + name));
    return b.stack(0, experts);
  };
  b.target("gate_up", b.cat(1, {stack("gate"), stack("up")}), DType::f32);
  b.target("down", b.permute({2, 0, 1}, stack("down")));
  const uint32_t qkv = b.stored("qkv");
  b.target("q", b.slice(0, 0, 4, qkv));
  b.target("kv", b.reshape({4, 2, 4}, b.gather(0, {4, 8, 5, 9, 6, 10, 7, 11}, qkv)));
  b.target("fresh", b.init(InitRule::normal, 1, {5, 3}, DType::f32));
  b.alias("again", "q");
  expect_grid(manifest, b.finish());
}

TEST(Transfers, AreOnePerTensorAndRankNotOnePerElement) {
  constexpr int kTensors = 1000, kRanks = 64;
  std::vector<TensorSpec> specs;
  for (int i = 0; i < kTensors; ++i) {
    specs.push_back(spec("t" + std::to_string(i), DType::bf16, {2 * kRanks, 32}));
  }
  const Manifest manifest = manifest_of(specs);
  const Recipe recipe = identity_recipe(manifest);
  const Plan plan = make_plan(manifest, recipe, fsdp2_layout(kRanks), options_of("own-shard"));
  for (const int rank : {0, 1, kRanks - 1}) {
    std::vector<int> of_target(kTensors);
    for_each_stored_transfer(plan, rank, [&](const Transfer& t) { ++of_target[t.buffer]; });
    EXPECT_EQ(of_target, std::vector<int>(kTensors, 1));
  }
  EXPECT_EQ(traffic(plan).transfers, uint64_t{kTensors} * kRanks);
}

TEST(Transfers, ElementsBelowAByteAreSplitAtByteBoundaries) {
  const auto plan_of = [](std::vector<int64_t> shape, int world, int dim) {
    const Manifest manifest =
        manifest_of({spec("whole", DType::bf16, {4}), spec("packed", DType::f4, std::move(shape))});
    const Recipe recipe = identity_recipe(manifest);
    const Plan plan =
        make_plan(manifest, recipe, fsdp2_layout(world, dim), options_of("own-shard"));
    expect_tiled(plan, dim);
  };
  plan_of({3, 2}, 2, 0);
  plan_of({10}, 3, 0);
  plan_of({3, 8}, 2, 1);
  for (const auto& [shape, world, dim] :
       {std::tuple{std::vector<int64_t>{6}, 2, 0}, {{2, 1}, 2, 0}, {{2, 6}, 2, 1}}) {
    const auto failure = failure_of([&, s = shape, w = world, d = dim] { plan_of(s, w, d); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->category(), Category::unsupported);
    EXPECT_EQ(failure->facts().tensor, "packed");
  }
}

TEST(Transfers, ElementsBelowAByteAreNotRearranged) {
  const Manifest manifest = manifest_of({spec("packed", DType::f4, {4, 4})});
  RecipeBuilder b(manifest);
  b.target("turned", b.permute({1, 0}, b.stored("packed")));
  const Recipe recipe = b.finish();
  const auto failure =
      failure_of([&] { make_plan(manifest, recipe, fsdp2_layout(1), options_of("own-shard")); });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::unsupported);
  EXPECT_EQ(failure->facts().tensor, "turned");
}

// --- reads ---

struct ReadRow {
  uint32_t file;
  uint64_t begin, end;
  bool direct;
  size_t transfers;
};

std::vector<ReadRow> reads_of(const Plan& plan, int rank) {
  std::vector<ReadRow> rows;
  std::vector<Transfer> table(kReadTableRows);
  for_each_read(plan, rank, table, [&](const Read& read) {
    rows.push_back({read.at.file, read.at.begin, read.at.end, read.direct, read.transfers.size()});
  });
  return rows;
}

// The reads of two tensors, of `a` and `b` bytes, with an unused tensor of `gap` bytes in between.
std::vector<ReadRow> reads_with_gap(int64_t a, int64_t gap, int64_t b) {
  const Manifest manifest = manifest_of(
      {spec("a", DType::u8, {a}), spec("gap", DType::u8, {gap}), spec("b", DType::u8, {b})});
  RecipeBuilder recipe(manifest);
  recipe.target("a", recipe.stored("a"));
  recipe.target("b", recipe.stored("b"));
  recipe.unused("gap");
  const Recipe finished = recipe.finish();
  return reads_of(make_plan(manifest, finished, fsdp2_layout(1), options_of("own-shard")), 0);
}

TEST(Reads, AreCoalescedThroughGapsOfASixtyFourth) {
  ASSERT_EQ(reads_with_gap(4096, 128, 4096).size(), 1U);
  EXPECT_FALSE(reads_with_gap(4096, 128, 4096)[0].direct);
  EXPECT_EQ(reads_with_gap(4096, 128, 4096)[0].transfers, 2U);
  const auto apart = reads_with_gap(4096, 129, 4096);
  ASSERT_EQ(apart.size(), 2U);
  EXPECT_TRUE(apart[0].direct && apart[1].direct);
  EXPECT_EQ(apart[0].end, kHeaderBytes + 4096);
  EXPECT_EQ(apart[1].begin, kHeaderBytes + 4096 + 129);
}

TEST(Reads, AreCoalescedUpTo64KiB) {
  EXPECT_EQ(reads_with_gap(64 * 1024, 0, 64 * 1024).size(), 1U);
  EXPECT_EQ(reads_with_gap(64 * 1024, 0, 64 * 1024 + 1).size(), 2U);
  EXPECT_EQ(reads_with_gap(64 * 1024 + 1, 0, 64 * 1024).size(), 2U);
}

TEST(Reads, OverReadAtMostA64th) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 300; ++i) {
    specs.push_back(spec("t" + std::to_string(i), DType::u8, {1 + i * 7919 % 3000}));
  }
  const Manifest manifest = manifest_of(specs, 90);
  const Recipe recipe = identity_recipe(manifest);
  for (const int world : {1, 3, 8}) {
    const Plan plan = make_plan(manifest, recipe, fsdp2_layout(world), options_of("own-shard"));
    const uint64_t useful = manifest.data_bytes();
    EXPECT_GE(traffic(plan).storage_read_bytes, useful);
    EXPECT_LE(traffic(plan).storage_read_bytes, useful + useful / 64);
    EXPECT_EQ(traffic(plan).needed_bytes, useful);
    for (int rank = 0; rank < world; ++rank) {
      const auto rows = reads_of(plan, rank);
      EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
        return std::pair(a.file, a.begin) < std::pair(b.file, b.begin);
      }));
    }
  }
}

TEST(Reads, CastsAndCopiesGoThroughStagingInTiles) {
  const Manifest manifest = manifest_of({spec("a", DType::bf16, {3 << 20})});
  Recipe recipe = identity_recipe(manifest);
  const auto rows_of = [&](const PlanOptions& options) {
    return reads_of(make_plan(manifest, recipe, fsdp2_layout(1), options), 0);
  };
  const auto direct = rows_of(options_of("own-shard"));
  ASSERT_EQ(direct.size(), 1U);
  EXPECT_TRUE(direct[0].direct);
  PlanOptions copies = options_of("own-shard");
  copies.destination = Destination::copy;
  const uint64_t small = make_plan(manifest, recipe, fsdp2_layout(1), copies).staging.tile_bytes;
  EXPECT_EQ(rows_of(copies).size(), ((6 << 20) + small - 1) / small);
  set_dtype(recipe, DType::f32, "");
  for (const ReadRow& row : rows_of(options_of("own-shard"))) EXPECT_FALSE(row.direct);
  const uint64_t tile =
      make_plan(manifest, recipe, fsdp2_layout(1), options_of("own-shard")).staging.tile_bytes;
  EXPECT_EQ(rows_of(options_of("own-shard")).size(), ((6 << 20) + tile - 1) / tile);
}

TEST(Reads, DirectOnesEndAt8MiB) {
  const Manifest manifest = manifest_of({spec("a", DType::u8, {(8 << 20) + 1})});
  const Recipe recipe = identity_recipe(manifest);
  const auto rows =
      reads_of(make_plan(manifest, recipe, fsdp2_layout(1), options_of("own-shard")), 0);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].end - rows[0].begin, 8U << 20);
  EXPECT_EQ(rows[1].end - rows[1].begin, 1U);
}

TEST(Reads, RunsFrom2KiBAreReadSinglyAndShorterOnesTogether) {
  constexpr int64_t kRows = 10;
  const auto rows_of = [](int64_t run_elements, int world) {
    const Manifest manifest = manifest_of({spec("a", DType::bf16, {kRows, run_elements * world})});
    const Recipe recipe = identity_recipe(manifest);
    return reads_of(make_plan(manifest, recipe, fsdp2_layout(world, 1), options_of("own-shard")),
                    0);
  };
  const auto rows = rows_of(1024, 2);
  ASSERT_EQ(rows.size(), size_t{kRows});
  for (const ReadRow& row : rows) {
    EXPECT_TRUE(row.direct);
    EXPECT_EQ(row.end - row.begin, 2048U);
  }
  const auto together = rows_of(1023, 2);
  ASSERT_EQ(together.size(), 1U);
  EXPECT_FALSE(together[0].direct);
  EXPECT_EQ(together[0].end - together[0].begin, 2046U * (2 * kRows - 1));
  EXPECT_EQ(rows_of(1023, 3).size(), 1U) << "gaps of 4092 bytes";
  EXPECT_EQ(rows_of(683, 4).size(), size_t{kRows}) << "gaps of 4098 bytes";
}

// --- strategies and staging ---

TEST(Strategy, ATypoInTheNameSuggestsTheNearest) {
  ASSERT_EQ(strategies().size(), 5U);
  for (const Strategy& strategy : strategies()) {
    EXPECT_EQ(&strategy_named(strategy.name), &strategy);
  }
  const auto failure = failure_of([] { strategy_named("own-shards"); });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::usage);
  EXPECT_NE(failure->what_happened().find("'own-shard'"), std::string::npos);
}

class PlanTest : public testing::Test {
 protected:
  Plan plan(std::string_view strategy, int world, uint64_t staging_bytes = 8 * kMiB,
            Destination destination = Destination::cpu) const {
    PlanOptions options = options_of(strategy, staging_bytes);
    options.destination = destination;
    return make_plan(manifest_, recipe_, fsdp2_layout(world), options);
  }

  const Manifest manifest_ =
      manifest_of({spec("a", DType::bf16, {1000, 1000}), spec("b", DType::bf16, {3}),
                   spec("c", DType::bf16, {300, 100})});
  const Recipe recipe_ = identity_recipe(manifest_);
};

TEST_F(PlanTest, StagingIsDividedByStrategy) {
  const auto expect = [](const Staging& s, const std::vector<uint64_t>& expected) {
    EXPECT_EQ((std::vector{s.total_bytes, s.ring_part_bytes, s.slot_bytes, s.tile_bytes,
                           static_cast<uint64_t>(s.workers)}),
              expected);
  };
  constexpr auto kCopy = Destination::copy;
  // Without a cast, the tile is the slot without its cast room.
  constexpr uint64_t kTile = kMiB - kLineRoomBytes;
  for (const int world : {1, 4}) {
    expect(plan("own-shard", world).staging, {8 * kMiB, 0, kMiB, kMiB, 7});
    expect(plan("own-shard", world, 8 * kMiB, kCopy).staging, {8 * kMiB, 0, kMiB, kTile, 7});
    expect(plan("full-per-rank", world).staging, {0, 0, 0, 0, 0});
    expect(plan("full-per-rank", world, 8 * kMiB, kCopy).staging, {8 * kMiB, 0, kMiB, kTile, 8});
  }
  // Cast to fp32, a tile of FP8 codes is four times as large: 5 * 209'664 <= 1 MiB.
  Recipe cast = recipe_;
  set_dtype(cast, DType::f32, "");
  PlanOptions copying = plan("own-shard", 4, 8 * kMiB, Destination::copy).options;
  expect(make_plan(manifest_, cast, fsdp2_layout(4), copying).staging,
         {8 * kMiB, 0, kMiB, 209'664, 7});
  expect(plan("rank0-broadcast", 1).staging, {0, 0, 0, 0, 0});
  expect(plan("rank0-broadcast", 4).staging, {2 * kMiB, 2 * kMiB, 0, 0, 0});
  expect(plan("rank0-broadcast", 4, 8 * kMiB, kCopy).staging, {8 * kMiB, 2 * kMiB, kMiB, kTile, 6});
  // Of the 256 KiB, the table's 1024 rows take 80 bytes each.
  expect(plan("own-shard", 4, kMinStagingBytes).staging, {262'144, 0, 180'224, 180'224, 1});
  expect(plan("rank0-broadcast", 100, kMinStagingBytes).staging, {kPageBytes, kPageBytes, 0, 0, 0});
  EXPECT_EQ(plan("own-shard", 1).staging.table_bytes, 81'920U);
}

TEST_F(PlanTest, WorkersSharesAndTheRingPartFitInTheStaging) {
  for (const Strategy& strategy : strategies()) {
    for (const Destination destination : {Destination::cpu, Destination::copy}) {
      for (const uint64_t staging : {kMinStagingBytes, kMiB + 1, 3 * kMiB, 50 * kMiB}) {
        for (const int world : {1, 2, 7, 64}) {
          const Staging s = plan(strategy.name, world, staging, destination).staging;
          const auto workers = static_cast<uint64_t>(s.workers);
          EXPECT_LE(s.ring_part_bytes + workers * (s.table_bytes + s.slot_bytes), s.total_bytes);
          EXPECT_LE(s.total_bytes, round_up(staging, kPageBytes));
          EXPECT_EQ(s.ring_part_bytes % kPageBytes, 0U);
          const bool streams =
              strategy.of_reader == Window::none || destination == Destination::copy;
          if (destination == Destination::copy && streams) {
            EXPECT_EQ(s.tile_bytes, s.slot_bytes - std::min(kLineRoomBytes, s.slot_bytes / 2));
          }
          EXPECT_EQ(workers > 0, streams);
          EXPECT_EQ(s.tile_bytes > 0, streams);
        }
      }
    }
  }
}

TEST_F(PlanTest, TooLittleStagingOrNoRankIsAUsageError) {
  for (const Strategy& strategy : strategies()) {
    EXPECT_NO_THROW(plan(strategy.name, 1, kMinStagingBytes));
    const auto failure = failure_of([&] { plan(strategy.name, 1, kMinStagingBytes - 1); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->category(), Category::usage);
    EXPECT_EQ(failure_of([&] { plan(strategy.name, 0); })->category(), Category::usage);
  }
}

// --- promise and budget ---

TEST_F(PlanTest, ThePromiseHasTheFootprintOfEachPhase) {
  const uint64_t model = 2000000 + 64 + 60000;  // a, b and c, each on a 64-byte boundary
  for (const Strategy& strategy : strategies()) {
    const Plan planned = plan(strategy.name, 4);
    ASSERT_EQ(planned.promise.phases.size(), 3U);
    EXPECT_EQ(planned.promise.launcher_bytes, kLauncherBytes);
    for (int rank = 0; rank < 4; ++rank) {
      const auto in = [&](size_t phase) {
        return planned.promise.phases[phase].of_rank[static_cast<size_t>(rank)];
      };
      Footprint open;
      open[Purpose::process] = 2 * kMiB;
      open[Purpose::header] = manifest_.held_bytes();
      open[Purpose::plan] = planned.held_bytes();
      Footprint hold = open;
      hold[Purpose::shards] = round_up(500032 + 64 + 15000, kPageBytes);
      Footprint load = hold;
      load[Purpose::staging] = planned.staging.total_bytes;
      if (strategy.name == "full-per-rank" || (strategy.name == "rank0-broadcast" && rank == 0)) {
        load[Purpose::window] = round_up(model, kPageBytes);
      } else if (strategy.name == "rank0-broadcast") {
        load[Purpose::window] = round_up(2000000, kPageBytes);
      }
      for (Footprint* phase : {&open, &load, &hold}) {
        (*phase)[Purpose::page_tables] = page_table_bytes(phase->ledger_total());
      }
      EXPECT_EQ(in(0), open) << strategy.name;
      EXPECT_EQ(in(1), load) << strategy.name;
      EXPECT_EQ(in(2), hold) << strategy.name;
      EXPECT_EQ(planned.promise.peak_phase(rank).name, "load");
    }
  }
}

// Children may keep a second copy of inherited shards, so the promise counts the shards twice.
TEST_F(PlanTest, ThePromiseCountsWhatForkedChildrenMayKeep) {
  PlanOptions options = options_of("own-shard");
  const Plan excluded = make_plan(manifest_, recipe_, fsdp2_layout(2), options);
  options.fork = Fork::shared;
  const Plan shared = make_plan(manifest_, recipe_, fsdp2_layout(2), options);
  options.fork = Fork::inherited;
  const Plan inherited = make_plan(manifest_, recipe_, fsdp2_layout(2), options);
  for (size_t phase = 0; phase < 3; ++phase) {
    Footprint expected = excluded.promise.phases[phase].of_rank[1];
    EXPECT_EQ(shared.promise.phases[phase].of_rank[1], expected);
    expected[Purpose::fork] = expected[Purpose::shards];
    expected[Purpose::page_tables] = page_table_bytes(expected.ledger_total());
    EXPECT_EQ(inherited.promise.phases[phase].of_rank[1], expected);
  }
  EXPECT_GT(inherited.promise.phases[kHoldPhase].of_rank[1][Purpose::fork], 0U);
  EXPECT_NE(excluded.inputs, shared.inputs);
  EXPECT_NE(excluded.inputs, inherited.inputs);
  EXPECT_NE(shared.inputs, inherited.inputs);
}

TEST_F(PlanTest, ThePeaksCauseNamesTheLargestOwners) {
  const Plan planned = plan("own-shard", 4);
  const auto owners = refusal_of(planned.promise, {0, "flag"})->facts().owners;
  EXPECT_TRUE(std::is_sorted(owners.begin(), owners.end(),
                             [](const Owner& a, const Owner& b) { return a.bytes > b.bytes; }));
  uint64_t sum = 0;
  for (const Owner& owner : owners) sum += owner.bytes;
  EXPECT_EQ(sum, planned.promise.node_peak_bytes(0));
  EXPECT_EQ(peak_cause(planned.promise, 0), "staging 32.00 MiB, process 16.00 MiB");
}

TEST_F(PlanTest, RanksAreSpreadOverNodes) {
  PlanOptions options = options_of("own-shard");
  options.ranks_per_node = 2;
  const Plan planned = make_plan(manifest_, recipe_, fsdp2_layout(5), options);
  EXPECT_EQ(planned.promise.node_of_rank, (std::vector<uint32_t>{0, 0, 1, 1, 2}));
  EXPECT_GT(planned.promise.node_peak_bytes(0), planned.promise.node_peak_bytes(2));
}

TEST_F(PlanTest, EachRankHasItsOwnBaseline) {
  PlanOptions options = options_of("own-shard");
  options.baseline_of = {5 * kMiB, 2 * kMiB};
  const Plan planned = make_plan(manifest_, recipe_, fsdp2_layout(2), options);
  const Plan alike = make_plan(manifest_, recipe_, fsdp2_layout(2), options_of("own-shard"));
  EXPECT_EQ(planned.promise.rank_peak_bytes(0), alike.promise.rank_peak_bytes(0) + 3 * kMiB);
  EXPECT_EQ(planned.promise.rank_peak_bytes(1), alike.promise.rank_peak_bytes(1));
}

// Catches: a refusal of a peak that equals the budget.
TEST_F(PlanTest, APeakThatEqualsTheBudgetFits) {
  PlanOptions options = options_of("own-shard");
  options.ranks_per_node = 2;
  for (const Plan& planned : {plan("own-shard", 4), plan("full-per-rank", 3),
                              make_plan(manifest_, recipe_, fsdp2_layout(3), options)}) {
    const uint64_t peak = planned.promise.node_peak_bytes(0);
    EXPECT_TRUE(fits(planned.promise, {peak, "flag"}));
    EXPECT_NO_THROW(require_fits(planned.promise, {peak, "flag"}));
    EXPECT_FALSE(fits(planned.promise, {peak - 1, "flag"})) << "the largest node decides";
  }
}

TEST_F(PlanTest, ARefusalHasTheShortfallAndTheLargestOwners) {
  const Plan planned = plan("own-shard", 4);
  const uint64_t peak = planned.promise.node_peak_bytes(0);
  const auto failure = failure_of([&] {
    require_fits(planned.promise, {peak - 5, "cgroup v1 /a"});
  });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->category(), Category::budget);
  EXPECT_EQ(failure->facts().shortfall_bytes, 5U);
  EXPECT_EQ(failure->facts().expected, std::to_string(peak - 5));
  EXPECT_EQ(failure->facts().got, std::to_string(peak));
  ASSERT_FALSE(failure->facts().owners.empty());
  EXPECT_EQ(failure->facts().owners[0].purpose, "staging");
  EXPECT_NE(failure->what_happened().find("cgroup v1 /a"), std::string::npos);
  EXPECT_NE(failure->what_happened().find("staging 32.00 MiB"), std::string::npos);
}

TEST_F(PlanTest, StagingShrinksAsFarAsNeededAndNoFurther) {
  for (const char* strategy : {"own-shard", "rank0-broadcast"}) {
    const int ranks = 4;
    const Plan planned = plan(strategy, ranks);
    const uint64_t parts = 8 * kMiB / planned.staging.total_bytes;  // 4 if the ranks share a ring
    const uint64_t peak = planned.promise.node_peak_bytes(0);
    for (const uint64_t over : {uint64_t{1}, ranks * kPageBytes, ranks * kPageBytes + 1,
                                ranks * 100 * kPageBytes, ranks * kMiB}) {
      const Budget budget{peak - over, "flag"};
      const Plan less = shrunk_to_fit(planned, budget);
      EXPECT_TRUE(fits(less.promise, budget)) << strategy << " over by " << over;
      const uint64_t each = round_up((over + ranks - 1) / ranks, kPageBytes);
      EXPECT_EQ(less.staging.total_bytes, planned.staging.total_bytes - each) << strategy;
      EXPECT_EQ(less.options.staging_bytes, 8 * kMiB - parts * each);
    }
  }
}

TEST_F(PlanTest, StagingShrinksOnlyIfNeededAndToTheLeastIfNothingFits) {
  for (const Strategy& strategy : strategies()) {
    const Plan planned = plan(strategy.name, 4);
    const uint64_t peak = planned.promise.node_peak_bytes(0);
    EXPECT_EQ(shrunk_to_fit(planned, {peak, "flag"}).options.staging_bytes, 8 * kMiB);
    const uint64_t staging_bytes = planned.staging.total_bytes;
    EXPECT_EQ(shrunk_to_fit(planned, {1, "flag"}).options.staging_bytes,
              staging_bytes > 0 ? kMinDefaultStagingBytes : 8 * kMiB)
        << strategy.name;
  }
  const Plan planned = plan("own-shard", 4);
  const Plan least = plan("own-shard", 4, kMinDefaultStagingBytes);
  const uint64_t enough = least.promise.node_peak_bytes(0);
  EXPECT_EQ(shrunk_to_fit(planned, {enough, "flag"}).options.staging_bytes,
            kMinDefaultStagingBytes);
  const Plan not_enough = shrunk_to_fit(planned, {enough - 1, "flag"});
  EXPECT_EQ(refusal_of(not_enough.promise, {enough - 1, "flag"})->facts().shortfall_bytes, 1U);
  const Plan less = shrunk_to_fit(planned, {enough - 1, "flag"}, kMinStagingBytes);
  EXPECT_TRUE(fits(less.promise, {enough - 1, "flag"}));
  const Plan small = plan("own-shard", 4, kMinStagingBytes);
  EXPECT_EQ(shrunk_to_fit(small, {1, "flag"}).options.staging_bytes, kMinStagingBytes);
}

// --- traffic and inputs ---

TEST_F(PlanTest, TrafficIsTheSumOverTheRanks) {
  const uint64_t model = manifest_.data_bytes();
  for (const Strategy& strategy : strategies()) {
    for (const int world : {1, 2, 5}) {
      const Plan planned = plan(strategy.name, world);
      const auto ranks = static_cast<uint64_t>(world);
      Traffic sum;
      for (int rank = 0; rank < world; ++rank) sum += traffic_of_rank(planned, rank);
      const Traffic all = traffic(planned);
      EXPECT_EQ(all, sum);
      const bool full = strategy.name == "full-per-rank";
      const bool sends = strategy.name == "rank0-broadcast";
      const uint64_t expected = full ? ranks * model : model;
      EXPECT_GE(all.storage_read_bytes, expected) << strategy.name;
      EXPECT_LE(all.storage_read_bytes,
                planned.strategy().of_reader == Window::none ? expected + expected / 64 : expected);
      if (strategy.name == "node-reader") {  // the leader sends each rank the bytes of its shards
        EXPECT_LE(all.exchanged_bytes, model - model / ranks + 4 * ranks * kPageBytes);
        EXPECT_EQ(all.exchanged_bytes > 0, world > 1);
        continue;
      }
      EXPECT_EQ(all.exchanged_bytes, sends ? (ranks - 1) * model : 0);
    }
  }
}

// Two ranks on each node.
TEST_F(PlanTest, ANodesLeaderReadsWhatItsRanksNeedOnce) {
  PlanOptions options = options_of("node-reader", 8 * kMiB);
  options.ranks_per_node = 2;
  const uint64_t model = manifest_.data_bytes();
  const auto read = [&](const Layout& layout) {
    const Plan planned = make_plan(manifest_, recipe_, layout, options);
    EXPECT_EQ(traffic_of_rank(planned, 1).storage_read_bytes, 0U);
    EXPECT_EQ(traffic_of_rank(planned, 0).exchanged_bytes, 0U);
    return traffic(planned).storage_read_bytes;
  };
  EXPECT_EQ(read(fsdp2_layout(4)), model);
  EXPECT_EQ(read(fsdp2_layout(5)), model);  // the last rank is alone on its node
  EXPECT_EQ(read(hsdp_layout(2, {2})), 2 * model);
  EXPECT_EQ(read(hsdp_layout(1, {4})), model);
  EXPECT_EQ(read(whole_layout(4)), 2 * model);
}

// Catches: a second node whose leader reads; a promise that merges the nodes.
TEST_F(PlanTest, IfOnlyRank0CanReadItBroadcastsToAllNodes) {
  Manifest manifest = manifest_;
  manifest.only_rank_0 = true;
  PlanOptions options = options_of("node-reader", 8 * kMiB);
  options.ranks_per_node = 2;
  const Plan planned = make_plan(manifest, recipe_, fsdp2_layout(4), options);
  EXPECT_EQ(planned.promise.node_of_rank, (std::vector<uint32_t>{0, 0, 1, 1}));
  EXPECT_EQ(exchange_group(planned, 3), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(traffic_of_rank(planned, 0).storage_read_bytes, manifest.data_bytes());
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_FALSE(reads_storage(planned, rank));
    EXPECT_GT(traffic_of_rank(planned, rank).exchanged_bytes, 0U);
  }
  options.strategy = &strategy_named("own-shard");
  const auto refusal = failure_of([&] { make_plan(manifest, recipe_, fsdp2_layout(4), options); });
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->category(), Category::usage);
}

TEST_F(PlanTest, ReplicasTakeTurnsReading) {
  const uint64_t model = manifest_.data_bytes();
  const auto striped_traffic = [&](const Layout& layout) {
    return traffic(make_plan(manifest_, recipe_, layout, options_of("replica-striped", 8 * kMiB)));
  };
  const Traffic of_two = striped_traffic(hsdp_layout(2, {2}));
  EXPECT_GE(of_two.storage_read_bytes, model);
  EXPECT_LE(of_two.storage_read_bytes, model + 64);  // gaps between neighbours
  EXPECT_EQ(of_two.exchanged_bytes, of_two.storage_read_bytes);
  EXPECT_EQ(striped_traffic(whole_layout(3)).storage_read_bytes, model);
  EXPECT_EQ(striped_traffic(whole_layout(3)).exchanged_bytes, 2 * model);
  EXPECT_EQ(striped_traffic(fsdp2_layout(4)).exchanged_bytes, 0U);
  const Plan striped =
      make_plan(manifest_, recipe_, hsdp_layout(2, {3}), options_of("replica-striped", 8 * kMiB));
  EXPECT_EQ(exchange_group(striped, 4), (std::vector<int>{1, 4}));
}

TEST_F(PlanTest, AChangedInputChangesTheInputsDigestACopyDoesNot) {
  const Digest as_it_is = plan("own-shard", 4).inputs;
  EXPECT_EQ(plan("own-shard", 4).inputs, as_it_is);
  const Manifest copy = manifest_;
  const Recipe again = identity_recipe(copy);
  PlanOptions options = options_of("own-shard", 8 * kMiB);
  EXPECT_EQ(make_plan(copy, again, fsdp2_layout(4), options).inputs, as_it_is);

  std::vector<Digest> digests = {as_it_is};
  const auto add = [&](const Digest& digest) {
    EXPECT_EQ(std::count(digests.begin(), digests.end(), digest), 0) << digests.size();
    digests.push_back(digest);
  };
  for (const Strategy& strategy : strategies()) {
    if (strategy.name != "own-shard") add(plan(strategy.name, 4).inputs);
  }
  add(plan("own-shard", 5).inputs);
  add(plan("own-shard", 4, 7 * kMiB).inputs);
  add(plan("own-shard", 4, 8 * kMiB, Destination::copy).inputs);
  add(make_plan(copy, again, fsdp2_layout(4, 1), options).inputs);
  add(make_plan(copy, again, whole_layout(4), options).inputs);
  Layout unpadded = fsdp2_layout(4);
  unpadded.kinds[0].cuts[0].pads = false;
  add(make_plan(copy, again, unpadded, options).inputs);
  Layout folded = fsdp2_layout(4);
  folded.kinds[0].mesh.sizes = {2, 2};
  add(make_plan(copy, again, folded, options).inputs);
  options.ranks_per_node = 2;
  add(make_plan(copy, again, fsdp2_layout(4), options).inputs);
  options = options_of("own-shard", 8 * kMiB);
  options.baseline_bytes += 1;
  add(make_plan(copy, again, fsdp2_layout(4), options).inputs);
  options.baseline_of = {1, 2, 3, 4};
  add(make_plan(copy, again, fsdp2_layout(4), options).inputs);
  options = options_of("own-shard", 8 * kMiB);
  Manifest other = manifest_;
  other.identity.low ^= 1;
  add(make_plan(other, again, fsdp2_layout(4), options).inputs);
  Recipe cast = again;
  set_dtype(cast, DType::f32, "");
  add(make_plan(copy, cast, fsdp2_layout(4), options).inputs);
  Recipe renamed = again;
  renamed.targets[0].spec.fqn = "z";
  add(make_plan(copy, renamed, fsdp2_layout(4), options).inputs);
}

}  // namespace
}  // namespace modicum
