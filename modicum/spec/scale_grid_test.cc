#include "modicum/spec/scale_grid.h"

#include <gtest/gtest.h>

namespace modicum {
namespace {

using Shape = std::vector<int64_t>;

constexpr MatrixSize k128{128, 128};

TEST(BlockOf, TheConfiguredSizeMayLeaveRaggedEdges) {
  EXPECT_EQ(block_of({200, 300}, {2, 3}, k128), k128);
  EXPECT_EQ(block_of({128, 1}, {1, 1}, k128), (MatrixSize{128, 1}));  // one scale: all of it
  EXPECT_EQ(block_of({5, 256, 129}, {5, 2, 2}, k128), k128);
  EXPECT_EQ(block_of({129}, {2}, k128), k128);
  EXPECT_EQ(block_of({0, 300}, {0, 3}, k128), k128);
}

TEST(BlockOf, AGridOfItsOwnMustDivide) {
  EXPECT_EQ(block_of({256, 384}, {2, 3}, std::nullopt), k128);
  EXPECT_EQ(block_of({256, 384}, {8, 3}, k128), (MatrixSize{32, 128}));
  EXPECT_EQ(block_of({7, 64}, {7, 1}, k128), (MatrixSize{1, 64}));  // one per row
  EXPECT_EQ(block_of({7, 64}, {7, 2}, std::nullopt), (MatrixSize{1, 32}));
  EXPECT_EQ(block_of({200, 300}, {2, 4}, std::nullopt), (MatrixSize{100, 75}));
  EXPECT_EQ(block_of({0, 64}, {0, 2}, std::nullopt), (MatrixSize{1, 32}));
}

TEST(BlockOf, OneScaleIsForAll) {
  for (const Shape& one : {Shape{}, Shape{1}, Shape{1, 1}, Shape{1, 1, 1}}) {
    EXPECT_EQ(block_of({200, 300}, one, k128), (MatrixSize{200, 300}));
    EXPECT_EQ(block_of({4, 200, 300}, one, std::nullopt), (MatrixSize{200, 300}));
    EXPECT_EQ(block_of({}, one, std::nullopt), (MatrixSize{1, 1}));
    EXPECT_EQ(block_of({0, 3}, one, std::nullopt), (MatrixSize{1, 3}));
  }
}

// Catches: scales per row that are taken for scales per column, and grids that are guessed.
TEST(BlockOf, WhatFitsNoSizeHasNone) {
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

TEST(ScaleGrid, OneScaleIsEveryCodes) {
  for (const Shape& one : {Shape{}, Shape{1, 1}, Shape{1, 1, 1}}) {
    const Manifest manifest = pair_of({3, 4, 5}, one, {4, 5});
    const ScaleGrid grid = scale_grid(manifest, manifest.tensors[0]);
    for (int64_t element = 0; element < 60; ++element) EXPECT_EQ(grid.index_of(element), 0);
  }
}

}  // namespace
}  // namespace modicum
