#include "modicum/layout/layout.h"

#include <gtest/gtest.h>

#include <numeric>

namespace modicum {
namespace {

TensorSpec tensor(std::vector<int64_t> shape) {
  return {"t", Role::param, DType::bf16, std::move(shape)};
}

// Row-major ids of the elements that `rank` holds, in local order: what torch would give for
// chunk(arange(numel).reshape(shape), world, dim)[rank].flatten().
std::vector<int64_t> held_ids(const Layout& layout, const TensorSpec& target, int rank) {
  std::vector<int64_t> ids(static_cast<size_t>(local_buffer(layout, target, rank).numel), -1);
  for_each_piece(layout, target, rank, [&](const Box& piece) {
    for_each_runs(piece, [&](const Runs& runs) {
      for (int64_t k = 0; k < runs.runs; ++k) {
        for (int64_t i = 0; i < runs.run; ++i) {
          auto& id = ids.at(static_cast<size_t>(runs.at + k * runs.at_stride + i * runs.at_step));
          EXPECT_EQ(id, -1) << "an element is placed twice";
          id = runs.first + k * runs.stride + i;
        }
      }
    });
  });
  return ids;
}

// torch.chunk from its documentation, element by element and knowing nothing of boxes.
std::vector<int64_t> chunk_by_hand(const std::vector<int64_t>& shape, int world, int rank,
                                   size_t dim) {
  const int64_t size = shape[dim];
  const int64_t chunk = (size + world - 1) / world;
  std::vector<int64_t> ids;
  const int64_t numel = numel_of(shape);
  int64_t inner = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
  for (int64_t id = 0; id < numel; ++id) {
    const int64_t index = id / inner % size;
    if (index >= rank * chunk && index < (rank + 1) * chunk) ids.push_back(id);
  }
  return ids;
}

// The vectors of torch.chunk with empty shards filled in: sizes per rank.
TEST(Layout, ChunkSizesAreTorchs) {
  const auto sizes = [](int64_t size, int world) {
    std::vector<int64_t> out;
    for (int rank = 0; rank < world; ++rank) {
      const Chunk chunk = chunk_of(size, world, rank);
      out.push_back(chunk.hi - chunk.lo);
    }
    return out;
  };
  using V = std::vector<int64_t>;
  EXPECT_EQ(sizes(5, 4), (V{2, 2, 1, 0}));
  EXPECT_EQ(sizes(7, 4), (V{2, 2, 2, 1}));
  EXPECT_EQ(sizes(9, 4), (V{3, 3, 3, 0}));
  EXPECT_EQ(sizes(10, 4), (V{3, 3, 3, 1}));
  EXPECT_EQ(sizes(6, 5), (V{2, 2, 2, 0, 0}));
  EXPECT_EQ(sizes(3, 8), (V{1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(sizes(17, 8), (V{3, 3, 3, 3, 3, 2, 0, 0}));
  EXPECT_EQ(sizes(1, 2), (V{1, 0}));
  EXPECT_EQ(sizes(0, 3), (V{0, 0, 0}));
  EXPECT_EQ(chunk_of(3, 8, 7).lo, 3);  // an empty shard lies at the end
}

TEST(Layout, PiecesAreTorchsChunksForSizesAndWorlds) {
  for (int64_t size = 0; size <= 40; ++size) {
    for (int world = 1; world <= 9; ++world) {
      for (const auto& shape : {std::vector<int64_t>{size}, {size, 3}, {size, 2, 2}}) {
        for (int rank = 0; rank < world; ++rank) {
          ASSERT_EQ(held_ids(fsdp2_layout(world), tensor(shape), rank),
                    chunk_by_hand(shape, world, rank, 0))
              << shape_text(shape) << " world " << world << " rank " << rank;
        }
      }
      for (const auto& shape : {std::vector<int64_t>{2, size}, {3, size, 2}}) {
        for (int rank = 0; rank < world; ++rank) {
          ASSERT_EQ(held_ids(fsdp2_layout(world, 1), tensor(shape), rank),
                    chunk_by_hand(shape, world, rank, 1))
              << shape_text(shape) << " world " << world << " rank " << rank;
        }
      }
    }
  }
}

TEST(Layout, LastRankIsShortAndPaddedWhenDimIsUneven) {
  const Layout layout = fsdp2_layout(4);
  const TensorSpec target = tensor({10, 6});
  EXPECT_EQ(local_shape(layout, target, 0), (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(local_shape(layout, target, 3), (std::vector<int64_t>{1, 6}));
  EXPECT_EQ(local_buffer(layout, target, 3).numel, 6);
  EXPECT_EQ(local_buffer(layout, target, 3).padded_numel, 18);
  EXPECT_EQ(local_buffer(layout, target, 3).bytes(), 36U);
}

TEST(Layout, EmptyShardsKeepTheOtherDimsAndThePadding) {
  const Layout layout = fsdp2_layout(4);
  EXPECT_EQ(local_shape(layout, tensor({5, 7}), 3), (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(local_buffer(layout, tensor({5, 7}), 3).numel, 0);
  EXPECT_EQ(local_buffer(layout, tensor({5, 7}), 3).padded_numel, 14);
}

TEST(Layout, ZeroDimTensorsAreOnEveryRankAndPrimaryOnTheFirst) {
  const Layout layout = fsdp2_layout(3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(held_ids(layout, tensor({}), rank), (std::vector<int64_t>{0}));
    EXPECT_EQ(is_primary(layout, tensor({}), rank), rank == 0);
    EXPECT_TRUE(is_primary(layout, tensor({4}), rank));
  }
}

TEST(Layout, ACutBeyondATensorsDimsIsAlongDimZero) {
  EXPECT_EQ(local_shape(fsdp2_layout(2, 1), tensor({5}), 1), (std::vector<int64_t>{2}));
}

TEST(Layout, WholeLayoutHoldsEverythingEverywhereOnce) {
  const Layout layout = whole_layout(3);
  const TensorSpec target = tensor({4, 2});
  EXPECT_EQ(local_shape(layout, target, 2), target.shape);
  EXPECT_TRUE(is_primary(layout, target, 0));
  EXPECT_FALSE(is_primary(layout, target, 2));
}

TEST(Layout, HsdpIsFsdp2WithinEachReplica) {
  const Layout layout = hsdp_layout(2, 3);
  for (int rank = 0; rank < 6; ++rank) {
    const TensorSpec target = tensor({7, 2});
    EXPECT_EQ(held_ids(layout, target, rank), chunk_by_hand({7, 2}, 3, rank % 3, 0));
    EXPECT_EQ(local_buffer(layout, target, rank).padded_numel, 6);
    EXPECT_EQ(is_primary(layout, target, rank), rank < 3);
    EXPECT_EQ(is_primary(layout, tensor({}), rank), rank == 0);
  }
}

// A mesh of two axes cuts left to right.
TEST(Layout, PlacementsApplyLeftToRight) {
  Layout layout{"test", {{2, 3}}, {{Placement::Kind::replicate, 0}, {Placement::Kind::shard, 0}}};
  EXPECT_EQ(layout.mesh.coordinate(4), (std::vector<int>{1, 1}));
  EXPECT_EQ(held_ids(layout, tensor({7}), 4), (std::vector<int64_t>{3, 4, 5}));
  EXPECT_TRUE(is_primary(layout, tensor({7}), 1));
  EXPECT_FALSE(is_primary(layout, tensor({7}), 4));
  layout.placements = {{Placement::Kind::shard, 0}, {Placement::Kind::shard, 0}};
  EXPECT_EQ(held_ids(layout, tensor({7}), 0), (std::vector<int64_t>{0, 1}));  // of [0, 4)
  EXPECT_EQ(held_ids(layout, tensor({7}), 5), (std::vector<int64_t>{6}));     // of [4, 7)
}

TEST(Layout, TensorsOfManyDimsAreCutAsFewDims) {
  const TensorSpec target = tensor(std::vector<int64_t>(40, 1));
  EXPECT_EQ(held_ids(fsdp2_layout(2), target, 0), (std::vector<int64_t>{0}));
  EXPECT_EQ(held_ids(fsdp2_layout(2), target, 1), (std::vector<int64_t>{}));
}

TEST(Layout, GlobalRunsSayWhereLocalElementsCameFrom) {
  const Layout layout = fsdp2_layout(3, 1);
  const TensorSpec target = tensor({4, 7, 2});
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<int64_t> ids = held_ids(layout, target, rank);
    for_each_piece(layout, target, rank, [&](const Box& piece) {
      for (int64_t begin = 0; begin < piece.numel(); begin += 5) {
        const int64_t end = std::min(begin + 5, piece.numel());
        int64_t next = begin;
        for_each_global_run(piece, begin, end, [&](int64_t global, int64_t local, int64_t n) {
          EXPECT_EQ(local, next);
          for (int64_t i = 0; i < n; ++i) {
            EXPECT_EQ(ids.at(static_cast<size_t>(piece.at + local + i)), global + i);
          }
          next += n;
        });
        EXPECT_EQ(next, end);
      }
    });
  }
}

}  // namespace
}  // namespace modicum
