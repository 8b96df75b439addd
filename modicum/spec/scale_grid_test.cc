#include "modicum/spec/scale_grid.h"

#include <gtest/gtest.h>

namespace modicum {
namespace {

using Shape = std::vector<int64_t>;

constexpr MatrixSize k128{128, 128};

TEST(BlockOf, TheConfiguredSizeMayLeaveIncompleteBlocks) {
  EXPECT_EQ(block_of({200, 300}, {2, 3}, k128), k128);
  EXPECT_EQ(block_of({128, 1}, {1, 1}, k128), (MatrixSize{128, 1}));  // one scale: all of it
  EXPECT_EQ(block_of({5, 256, 129}, {5, 2, 2}, k128), k128);
  EXPECT_EQ(block_of({129}, {2}, k128), k128);
  EXPECT_EQ(block_of({0, 300}, {0, 3}, k128), k128);
}

// Catches: a size that is guessed although several give the grid.
TEST(BlockOf, WithoutAConfiguredSizeTheGridMustAllowOnlyOne) {
  EXPECT_EQ(block_of({7, 64}, {7, 1}, k128), (MatrixSize{1, 64}));  // one per row
  EXPECT_EQ(block_of({0, 64}, {0, 1}, std::nullopt), (MatrixSize{1, 64}));
  EXPECT_EQ(block_of({1, 7}, {1, 4}, std::nullopt), (MatrixSize{1, 2}));  // 2 + 2 + 2 + 1
  EXPECT_EQ(block_of({256, 384}, {2, 3}, std::nullopt), std::nullopt);    // 128 to 191 columns
  EXPECT_EQ(block_of({256, 384}, {8, 3}, k128), std::nullopt);
}

// Compares block_of with trying every size.
TEST(BlockOf, IsTheOnlyPossibleSizeOrNone) {
  for (int64_t size = 1; size <= 40; ++size) {
    for (int64_t count = 1; count <= 42; ++count) {
      std::vector<int64_t> makes;
      for (int64_t block = 1; block <= size; ++block) {
        if ((size + block - 1) / block == count) makes.push_back(block);
      }
      const auto block = block_of({1, size}, {1, count}, std::nullopt);
      ASSERT_EQ(block.has_value(), makes.size() == 1) << size << " in " << count;
      if (block) {
        EXPECT_EQ((*block)[1], makes[0]);
      }
    }
  }
}

TEST(LikelyBlock, DividesEvenlyAndHasNoRivalPowerOfTwo) {
  EXPECT_EQ(likely_block({256, 384}, {2, 3}), k128);
  EXPECT_EQ(likely_block({256, 384}, {8, 3}), (MatrixSize{32, 128}));
  EXPECT_EQ(likely_block({7, 64}, {7, 2}), (MatrixSize{1, 32}));
  EXPECT_EQ(likely_block({0, 64}, {0, 2}), (MatrixSize{1, 32}));
  EXPECT_EQ(likely_block({960, 64}, {10, 1}), (MatrixSize{96, 64}));  // 96 to 106 rows
  EXPECT_EQ(likely_block({192, 64}, {2, 1}), std::nullopt);           // 96 + 96, or 128 + 64
  EXPECT_EQ(likely_block({200, 300}, {2, 3}), std::nullopt);
  EXPECT_EQ(likely_block({200, 301}, {2, 2}), std::nullopt);
  EXPECT_EQ(likely_block({4, 256, 256}, {3, 2, 2}), std::nullopt);
  EXPECT_EQ(likely_block({4, 4}, {8, 8}), std::nullopt);
}

TEST(BlockOf, ASingleScaleCoversAllCodes) {
  for (const Shape& scale_shape : {Shape{}, Shape{1}, Shape{1, 1}, Shape{1, 1, 1}}) {
    EXPECT_EQ(block_of({200, 300}, scale_shape, k128), (MatrixSize{200, 300}));
    EXPECT_EQ(block_of({4, 200, 300}, scale_shape, std::nullopt), (MatrixSize{200, 300}));
    EXPECT_EQ(block_of({}, scale_shape, std::nullopt), (MatrixSize{1, 1}));
    EXPECT_EQ(block_of({0, 3}, scale_shape, std::nullopt), (MatrixSize{1, 3}));
  }
}

// Catches: scales per row that are mistaken for scales per column; a guessed grid.
TEST(BlockOf, AGridThatFitsNoSizeHasNone) {
  EXPECT_EQ(block_of({200, 301}, {2, 2}, std::nullopt), std::nullopt);
  EXPECT_EQ(block_of({200, 300}, {2, 7}, k128), std::nullopt);
  EXPECT_EQ(block_of({256, 256}, {256}, std::nullopt), std::nullopt);
  EXPECT_EQ(block_of({4, 256, 256}, {3, 2, 2}, k128), std::nullopt);
  EXPECT_EQ(block_of({4, 256, 256}, {2, 2}, k128), std::nullopt);
  EXPECT_EQ(block_of({4, 4}, {8, 8}, std::nullopt), std::nullopt);
  EXPECT_EQ(block_of({4, 4}, {0, 4}, std::nullopt), std::nullopt);
  EXPECT_EQ(block_of({INT64_MAX, 1}, {2, 2}, MatrixSize{INT64_MAX, INT64_MAX}), std::nullopt);
}

Manifest pair_of(Shape codes, Shape scales, MatrixSize block) {
  Manifest manifest;
  manifest.tensors.push_back({{"w", Role::param, DType::f8_e4m3, std::move(codes)}, {}});
  manifest.tensors.push_back({{"w_scale_inv", Role::param, DType::f32, std::move(scales)}, {}});
  manifest.tensors[0].scale = BlockScale{1, block};
  return manifest;
}

TEST(ScaleGrid, FindsTheScaleOfEachCode) {
  const Manifest manifest = pair_of({2, 5, 7}, {2, 3, 2}, {2, 4});
  const ScaleGrid grid = scale_grid(manifest, manifest.tensors[0]);
  for (int64_t m = 0; m < 2; ++m) {
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t c = 0; c < 7; ++c) {
        const int64_t element = (m * 5 + r) * 7 + c;
        EXPECT_EQ(grid.row_of(element), m * 3 + r / 2);
        EXPECT_EQ(grid.index_of(element), (m * 3 + r / 2) * 2 + c / 4);
      }
    }
  }
}

TEST(ScaleGrid, ASingleScaleAppliesToAllCodes) {
  for (const Shape& scale_shape : {Shape{}, Shape{1, 1}, Shape{1, 1, 1}}) {
    const Manifest manifest = pair_of({3, 4, 5}, scale_shape, {4, 5});
    const ScaleGrid grid = scale_grid(manifest, manifest.tensors[0]);
    for (int64_t element = 0; element < 60; ++element) EXPECT_EQ(grid.index_of(element), 0);
  }
}

}  // namespace
}  // namespace modicum
