// Plans over FP8 codes: the scales that are read with them, and the memory for these scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"
#include "modicum/plan/traffic_double.h"

namespace modicum {
namespace {

struct Pair {
  std::vector<int64_t> codes;   // the shape
  std::vector<int64_t> scales;  // the shape
  DType scale_dtype = DType::f32;
};

// Pairs "w0" and "w0_scale_inv", ..., in one file.
Manifest manifest_of(const std::vector<Pair>& pairs) {
  Manifest manifest;
  manifest.files.push_back({"model.safetensors", {}, 64});
  uint64_t end = 64;
  const auto add = [&](const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    const uint64_t bytes = bytes_of(dtype, numel_of(shape));
    manifest.tensors.push_back({{name, Role::param, dtype, shape}, {0, end, end + bytes}});
    end += bytes;
  };
  for (size_t i = 0; i < pairs.size(); ++i) {
    const std::string name = "w" + std::to_string(i);
    add(name, DType::f8_e4m3, pairs[i].codes);
    add(name + "_scale_inv", pairs[i].scale_dtype, pairs[i].scales);
    const auto block = block_of(pairs[i].codes, pairs[i].scales, MatrixSize{128, 128});
    const auto scale = static_cast<uint32_t>(manifest.tensors.size() - 1);
    manifest.tensors[scale - 1].scale = BlockScale{scale, block.value_or(MatrixSize{})};
  }
  manifest.files[0].identity.size_bytes = end;
  return manifest;
}

Plan plan_of(const Manifest& manifest, const Recipe& recipe, const Layout& layout,
             std::string_view strategy = "own-shard", Destination destination = Destination::cpu) {
  return make_plan(manifest, recipe, layout,
                   {.strategy = &strategy_named(strategy),
                    .destination = destination,
                    .staging_bytes = kMinStagingBytes});
}

struct Reading {
  std::vector<Read> reads;
  std::vector<std::vector<Transfer>> transfers;  // one list per read
};
Reading reading_of(const Plan& plan, int rank) {
  Reading reading;
  std::vector<Transfer> table(kReadTableRows);
  for_each_read(plan, rank, table, [&](const Read& read) {
    reading.reads.push_back(read);
    reading.transfers.emplace_back(read.transfers.begin(), read.transfers.end());
  });
  return reading;
}

// The scale of each code is inside the read's extent of scales.
void expect_scales_of_codes_are_read(const Plan& plan, const Read& read, const Transfer& t) {
  const StoredTensor& codes = plan.manifest->tensors[t.from];
  const StoredTensor& scales = plan.manifest->tensors[codes.scale->tensor];
  const ScaleGrid grid = scale_grid(*plan.manifest, codes);
  for (int64_t k = 0; k < t.runs.count; ++k) {
    for (int64_t i = 0; i < t.runs.length; ++i) {
      const int64_t index = grid.index_of(t.runs.first + k * t.runs.stride + i);
      const Extent at = extent_of(scales, index, 1);
      ASSERT_LE(read.scale.begin, at.begin);
      ASSERT_GE(read.scale.end, at.end);
    }
  }
}

// Every read is staged, fits the tile together with its scales, and has one tensor's codes.
void expect_sound(const Plan& plan, int rank) {
  const Reading reading = reading_of(plan, rank);
  uint64_t bytes = 0;
  for (size_t i = 0; i < reading.reads.size(); ++i) {
    const Read& read = reading.reads[i];
    bytes += read.at.end - read.at.begin + read.scale.bytes();
    ASSERT_FALSE(read.direct);
    ASSERT_GT(read.scale.bytes(), 0U);
    ASSERT_LE(read.at.end - read.at.begin + read.scale.bytes(), plan.staging.tile_bytes);
    const StoredTensor& codes = plan.manifest->tensors[reading.transfers[i][0].from];
    const Extent& scales = plan.manifest->tensors[codes.scale->tensor].at;
    ASSERT_EQ(read.scale.file, scales.file);
    ASSERT_GE(read.scale.begin, scales.begin);
    ASSERT_LE(read.scale.end, scales.end);
    for (const Transfer& t : reading.transfers[i]) {
      ASSERT_EQ(t.from, reading.transfers[i][0].from);
      ASSERT_TRUE(t.dequantises());
      expect_scales_of_codes_are_read(plan, read, t);
    }
  }
  ASSERT_EQ(traffic_of_rank(plan, rank).storage_read_bytes, bytes);
}

// Codes over many tiles, grids larger than a tile, one scale per row, per column, per code and per
// tensor: every staged read fits its tile together with the scales of all its codes.
TEST(ScaleReads, FitInTheTileTogetherWithTheirCodes) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 3}},
                                         {{1000, 700}, {8, 6}},
                                         {{3, 200, 300}, {3, 2, 3}, DType::bf16},
                                         {{100'000, 1}, {100'000, 1}},
                                         {{2, 100'000}, {2, 100'000}},
                                         {{3, 90'000}, {1, 90'000}},
                                         {{90'000, 3}, {90'000, 3}, DType::u8},
                                         {{400, 400}, {1}},
                                         {{400}, {4}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  for (const int world : {1, 3, 5}) {
    for (const int dim : {0, 1}) {
      for (const Destination destination : {Destination::cpu, Destination::copy}) {
        const Plan plan =
            plan_of(manifest, recipe, fsdp2_layout(world, dim), "own-shard", destination);
        for (int rank = 0; rank < world; ++rank) {
          SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << world << " dim " << dim);
          expect_sound(plan, rank);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// Codes [200, 300] in blocks of [128, 128]: rank 1's rows 67..133 lie in both rows of blocks. A cut
// along columns reads whole rows of the grid. A tile within one row of codes reads a part of one
// row of the grid.
TEST(ScaleReads, AreWholeRowsOfTheGridOrPartOfOneRow) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 3}}, {{1, 400}, {1, 4}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::f32});
  const uint64_t grid = manifest.tensors[1].at.begin;
  const Plan rows = plan_of(manifest, recipe, fsdp2_layout(3));
  for (const auto& [rank, begin, end] :
       {std::tuple{0, grid, grid + 12}, {1, grid, grid + 24}, {2, grid + 12, grid + 24}}) {
    const Reading reading = reading_of(rows, rank);
    EXPECT_EQ(reading.reads[0].scale, (Extent{0, begin, end})) << rank;
  }
  const Plan columns = plan_of(manifest, recipe, fsdp2_layout(2, 1));
  const Reading reading = reading_of(columns, 1);
  ASSERT_EQ(reading.reads.size(), 2U);
  EXPECT_EQ(reading.reads[0].scale, (Extent{0, grid, grid + 24}));
  const uint64_t of_row = manifest.tensors[3].at.begin;  // columns 200..399: scales 1, 2, 3
  EXPECT_EQ(reading.reads[1].scale, (Extent{0, of_row + 4, of_row + 16}));
}

// Catches: a plan that reads scales once per run, or all scales for every tile.
TEST(ScaleReads, AddAtMost2Percent) {
  const Manifest manifest = manifest_of({{{18432, 1024}, {144, 8}}, {{1024, 18432}, {8, 144}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  const uint64_t bytes = manifest.data_bytes();
  for (const int world : {1, 2, 8}) {
    for (const Destination destination : {Destination::cpu, Destination::copy}) {
      const Plan plan = plan_of(manifest, recipe, fsdp2_layout(world), "own-shard", destination);
      const Traffic all = traffic(plan);
      EXPECT_GE(all.storage_read_bytes, bytes);
      EXPECT_LE(all.storage_read_bytes, bytes + bytes / 50) << world;
    }
  }
  // Tiles of the default staging are larger, and the scales add at most 0.5 %.
  for (const Destination destination : {Destination::cpu, Destination::copy}) {
    const Plan plan =
        make_plan(manifest, recipe, fsdp2_layout(4),
                  {.strategy = &strategy_named("own-shard"), .destination = destination});
    EXPECT_LE(traffic(plan).storage_read_bytes, bytes + bytes / 200);
    EXPECT_LE(traffic(plan).reads, 3 * (bytes / plan.staging.tile_bytes + 10));
  }
}

TEST(ScaleReads, CodesLoadedAsStoredNeedNone) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 7}}});  // a grid that fits no block size
  const Recipe recipe = make_recipe(manifest);
  const Plan plan = plan_of(manifest, recipe, fsdp2_layout(2));
  EXPECT_EQ(scale_beside(plan, 0), std::nullopt);
  EXPECT_TRUE(gives_elements(plan, 1));
  for (const Read& read : reading_of(plan, 0).reads) EXPECT_EQ(read.scale.bytes(), 0U);
}

// A window of one tensor holds codes and scales; a window of the whole model holds all scales.
TEST(ScaleReads, AreHeldInWindows) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 3}}, {{100, 100}, {100, 100}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  const auto window_of = [&](std::string_view strategy, size_t rank) {
    const Plan plan = plan_of(manifest, recipe, fsdp2_layout(2), strategy);
    return plan.promise.phases[kLoadPhase].of_rank[rank][Purpose::window];
  };
  const auto pages = [](uint64_t bytes) { return round_up(bytes, kPageBytes); };
  const uint64_t first = round_up(60'000, 64), second = round_up(10'000, 64);
  const uint64_t all = first + 64 + second + 40'000;
  EXPECT_EQ(window_of("full-per-rank", 1), pages(all));
  EXPECT_EQ(window_of("rank0-broadcast", 0), pages(all));
  EXPECT_EQ(window_of("rank0-broadcast", 1), pages(first + 24));
  const Plan plan = plan_of(manifest, recipe, fsdp2_layout(3), "rank0-broadcast");
  EXPECT_EQ(scale_beside(plan, 2), std::optional<uint32_t>(3));
  EXPECT_TRUE(is_needed(plan, 3));
  EXPECT_FALSE(gives_elements(plan, 3));
  EXPECT_EQ(traffic_of_rank(plan, 0).storage_read_bytes, manifest.data_bytes());
  EXPECT_EQ(traffic_of_rank(plan, 1).exchanged_bytes, manifest.data_bytes());
}

TEST(ScaleReads, TheWindowOfOneTensorFitsTheLargestPair) {
  // The first pair is the largest, since its scales have more bytes than its codes, although the
  // second pair has more codes.
  const Manifest manifest = manifest_of({{{100, 100}, {100, 100}}, {{150, 300}, {1}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  const Plan plan = plan_of(manifest, recipe, fsdp2_layout(2), "rank0-broadcast");
  EXPECT_EQ(plan.promise.phases[kLoadPhase].of_rank[1][Purpose::window],
            round_up(round_up(10'000, 64) + 40'000, kPageBytes));
}

std::optional<Error> failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(ScaleReads, AGridThatFitsNoBlockSizeIsRefusedIfItIsNeeded) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 7}}});
  const Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  const auto error = failure_of([&] { plan_of(manifest, recipe, fsdp2_layout(2)); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->category(), Category::mismatch);
  EXPECT_EQ(error->facts().tensor, "w0");
  EXPECT_NE(error->what_happened().find("w0_scale_inv"), std::string::npos);
  EXPECT_EQ(error->facts().got, "[2, 7]");
}

TEST(ScaleReads, CodesWithoutScalesAreRefusedIfTheyAreNeeded) {
  Manifest manifest = manifest_of({{{8, 8}, {1}}});
  Recipe recipe = make_recipe(manifest, {.dtype = DType::bf16});
  manifest.tensors[0].scale.reset();
  const auto error = failure_of([&] { plan_of(manifest, recipe, fsdp2_layout(1)); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->category(), Category::unsupported);
  EXPECT_EQ(error->facts().tensor, "w0");
}

// Catches: an inputs digest that is equal on a rank that dequantises and one that does not.
TEST(ScaleReads, DequantisingChangesTheInputsDigest) {
  const Manifest manifest = manifest_of({{{200, 300}, {2, 3}}});
  const Recipe as_stored = make_recipe(manifest);
  const Recipe as_bf16 = make_recipe(manifest, {.dtype = DType::bf16});
  EXPECT_NE(plan_of(manifest, as_stored, fsdp2_layout(2)).inputs,
            plan_of(manifest, as_bf16, fsdp2_layout(2)).inputs);
}

}  // namespace
}  // namespace modicum
