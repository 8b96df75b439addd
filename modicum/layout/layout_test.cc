#include "modicum/layout/layout.h"

#include <gtest/gtest.h>

#include <numeric>

#include "modicum/layout/held_ids_double.h"

namespace modicum {
namespace {

TensorSpec tensor(std::vector<int64_t> shape) {
  return {"t", Role::param, DType::bf16, std::move(shape)};
}

std::vector<int64_t> held_ids(const Layout& layout, const TensorSpec& target, int rank) {
  return held_ids(layout.kinds[0], target, rank);
}

// The documented rule of torch.chunk, element by element and without boxes.
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

// The expected sizes per rank are those of torch.chunk, with empty shards added.
TEST(Layout, ChunkSizesEqualTorchs) {
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
  EXPECT_EQ(chunk_of(3, 8, 7).lo, 3) << "an empty shard begins at the dim's end";
}

TEST(Layout, PiecesEqualTorchsChunks) {
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
  EXPECT_EQ(local_shape(layout.kinds[0], target, 0), (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(local_shape(layout.kinds[0], target, 3), (std::vector<int64_t>{1, 6}));
  EXPECT_EQ(local_buffer(layout.kinds[0], target, 3).numel, 6);
  EXPECT_EQ(local_buffer(layout.kinds[0], target, 3).padded_numel, 18);
  EXPECT_EQ(local_buffer(layout.kinds[0], target, 3).bytes(), 36U);
}

TEST(Layout, EmptyShardsKeepTheOtherDimsAndThePadding) {
  const Layout layout = fsdp2_layout(4);
  EXPECT_EQ(local_shape(layout.kinds[0], tensor({5, 7}), 3), (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(local_buffer(layout.kinds[0], tensor({5, 7}), 3).numel, 0);
  EXPECT_EQ(local_buffer(layout.kinds[0], tensor({5, 7}), 3).padded_numel, 14);
}

TEST(Layout, ZeroDimTensorsAreReplicatedWithRankZeroPrimary) {
  const Layout layout = fsdp2_layout(3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(held_ids(layout, tensor({}), rank), (std::vector<int64_t>{0}));
    EXPECT_EQ(is_primary(layout.kinds[0], tensor({}), rank), rank == 0);
    EXPECT_TRUE(is_primary(layout.kinds[0], tensor({4}), rank));
  }
}

TEST(Layout, ACutBeyondATensorsDimsIsAlongDimZero) {
  EXPECT_EQ(local_shape(fsdp2_layout(2, 1).kinds[0], tensor({5}), 1), (std::vector<int64_t>{2}));
}

TEST(Layout, WholeLayoutReplicatesEverything) {
  const Layout layout = whole_layout(3);
  const TensorSpec target = tensor({4, 2});
  EXPECT_EQ(local_shape(layout.kinds[0], target, 2), target.shape);
  EXPECT_TRUE(is_primary(layout.kinds[0], target, 0));
  EXPECT_FALSE(is_primary(layout.kinds[0], target, 2));
}

TEST(Layout, HsdpIsFsdp2WithinEachReplica) {
  const Layout layout = hsdp_layout(2, {3});
  for (int rank = 0; rank < 6; ++rank) {
    const TensorSpec target = tensor({7, 2});
    EXPECT_EQ(held_ids(layout, target, rank), chunk_by_hand({7, 2}, 3, rank % 3, 0));
    EXPECT_EQ(local_buffer(layout.kinds[0], target, rank).padded_numel, 6);
    EXPECT_EQ(is_primary(layout.kinds[0], target, rank), rank < 3);
    EXPECT_EQ(replica_place(layout.kinds[0], target, rank).count, 2);
    EXPECT_EQ(replica_place(layout.kinds[0], target, rank).index, rank / 3);
    EXPECT_EQ(is_primary(layout.kinds[0], tensor({}), rank), rank == 0);
  }
}

using Ids = std::vector<int64_t>;

// The part of a dim's indices that one cut gives a rank, as in torch: its chunk of each packed
// part, concatenated.
Ids cut_by_hand(const Ids& along, int packed, int parts, int part) {
  Ids mine;
  const auto chunk = [](int64_t n, int count) { return (n + count - 1) / count; };
  const auto size = static_cast<int64_t>(along.size());
  const int64_t q = chunk(size, packed);
  for (int64_t p = 0; p < packed; ++p) {
    const int64_t lo = std::min(size, p * q), hi = std::min(size, lo + q);
    const int64_t r = chunk(hi - lo, parts);
    for (int64_t i = lo + part * r; i < std::min(hi, lo + (part + 1) * r); ++i) {
      mine.push_back(along[static_cast<size_t>(i)]);
    }
  }
  return mine;
}

Ids indices(int64_t n) {
  Ids all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// The row-major ids of the elements in these rows and columns.
Ids product(const Ids& rows, const Ids& columns, int64_t row_size) {
  Ids ids;
  for (const int64_t r : rows) {
    for (const int64_t c : columns) ids.push_back(r * row_size + c);
  }
  return ids;
}

TEST(Layout, StridedShardsAreChunksOfEachPackedPart) {
  const auto indices_by_rank = [](int64_t n, int packed, int world) {
    const Layout layout =
        make_layout("test", {.mesh = {{world}}, .cuts = {{.axes = {0}, .packed = packed}}});
    std::vector<Ids> all;
    for (int rank = 0; rank < world; ++rank) all.push_back(held_ids(layout, tensor({n}), rank));
    return all;
  };
  using All = std::vector<Ids>;
  EXPECT_EQ(indices_by_rank(9, 2, 4), (All{{0, 1, 5}, {2, 3, 6}, {4, 7}, {8}}));
  EXPECT_EQ(indices_by_rank(10, 2, 2), (All{{0, 1, 2, 5, 6, 7}, {3, 4, 8, 9}}));
  EXPECT_EQ(indices_by_rank(10, 4, 2), (All{{0, 1, 3, 4, 6, 7, 9}, {2, 5, 8}}));
  EXPECT_EQ(indices_by_rank(5, 2, 4), (All{{0, 3}, {1, 4}, {2}, {}}));
  EXPECT_EQ(indices_by_rank(7, 2, 2), (All{{0, 1, 4, 5}, {2, 3, 6}}));
}

TEST(Layout, TpCutsFirstAndFsdpCutsItsShards) {
  for (const auto& sizes : {std::pair(2, 2), {3, 2}, {2, 3}, {4, 4}, {1, 3}, {3, 1}}) {
    const int dp = sizes.first;
    const int tp = sizes.second;
    for (const int dim : {0, 1}) {
      const Layout layout = tp_fsdp_layout({dp}, tp, dim);
      for (int64_t n = 0; n <= 13; ++n) {
        const TensorSpec target = tensor({n, n + 1});
        for (int rank = 0; rank < dp * tp; ++rank) {
          const auto check = [&](TpKind kind, int tp_dim, int packed, int tp_parts) {
            Ids along[2] = {indices(n), indices(n + 1)};
            along[tp_dim] = cut_by_hand(along[tp_dim], packed, tp_parts, rank % tp % tp_parts);
            const auto tp_rows = static_cast<int64_t>(along[0].size());
            along[dim] = cut_by_hand(along[dim], 1, dp, rank / tp);
            const Sharding& sharding = layout.kinds[static_cast<size_t>(kind)];
            ASSERT_EQ(held_ids(sharding, target, rank), product(along[0], along[1], n + 1))
                << dp << "x" << tp << " n " << n << " rank " << rank << " dim " << dim;
            // FSDP2 pads TP's shard along dim 0.
            const int64_t rows = dim == 0 ? (tp_rows + dp - 1) / dp : tp_rows;
            ASSERT_EQ(local_buffer(sharding, target, rank).padded_numel,
                      rows * static_cast<int64_t>(along[1].size()));
          };
          check(TpKind::columns, 0, 1, tp);
          check(TpKind::rows, 1, 1, tp);
          check(TpKind::packed, 0, 2, tp);
          check(TpKind::replicated, 0, 1, 1);
        }
      }
    }
  }
}

// If DTensor's placements (strided, shard) were applied left to right, rank 4 would hold row 6.
TEST(Layout, AnUnevenTpShardIsCutByFsdp) {
  const Sharding sharding = tp_fsdp_layout({3}, 2).kinds[0];
  EXPECT_EQ(held_ids(sharding, tensor({7}), 4), Ids{});
  EXPECT_EQ(held_ids(sharding, tensor({7}), 5), Ids{6});
}

TEST(Layout, FlattenedAxesAreOneAxis) {
  const Sharding flattened = tp_fsdp_layout({2, 3}, 2).kinds[0];
  const Sharding single = tp_fsdp_layout({6}, 2).kinds[0];
  for (int rank = 0; rank < 12; ++rank) {
    EXPECT_EQ(held_ids(flattened, tensor({29, 2}), rank), held_ids(single, tensor({29, 2}), rank));
  }
  // Axes that are not neighbours: (a, b, c) with a and c flattened.
  const Layout apart = make_layout("test", {.mesh = {{2, 3, 2}}, .cuts = {{.axes = {0, 2}}}});
  for (int rank = 0; rank < 12; ++rank) {
    EXPECT_EQ(held_ids(apart, tensor({8}), rank),
              chunk_by_hand({8}, 4, rank / 6 * 2 + rank % 2, 0));
    EXPECT_EQ(is_primary(apart.kinds[0], tensor({8}), rank), rank / 2 % 3 == 0);
  }
}

TEST(Layout, ExpertsAreSplitAmongEpFirst) {
  Layout layout = fsdp2_layout(6);
  const Sharding sharding = layout.kinds[add_expert_kind(layout, 3, 2, 1)];
  for (int rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(held_ids(sharding, tensor({4, 7}), rank),
              product(cut_by_hand(indices(4), 1, 2, rank % 2),
                      cut_by_hand(indices(7), 1, 3, rank / 2), 7));
  }
  EXPECT_THROW(add_expert_kind(layout, 2, 2), Error);
}

// a, b and c have 10, 7 and 5 elements, 22 in all. Two zeros pad them to a multiple of 2 x 4 ranks.
TEST(Layout, FlatGroupsEqualDeepSpeeds) {
  const TensorSpec a = tensor({10}), b = tensor({7, 1}), c = tensor({5});
  const TensorSpec step{"step", Role::buffer, DType::i64, {}};
  const std::vector<const TensorSpec*> targets = {&a, &step, &b, nullptr, &c};
  const Layout layout = flat_layout("zero2", 4, targets, false);
  ASSERT_EQ(layout.flats.size(), 1U);
  const FlatGroup& flat = layout.flats[0];
  EXPECT_EQ(flat.numel, 22);
  EXPECT_EQ(flat.part, 6);
  EXPECT_FALSE(layout.is_flat(1));
  EXPECT_FALSE(layout.is_flat(3));
  // The elements [lo, hi) of target t on the rank, and the place of the first in the rank's buffer.
  const auto held_ids = [&](uint32_t t, int rank) {
    const Box box = flat_piece(flat, layout.places[t].begin, numel_of(targets[t]->shape), rank);
    return box.empty() ? Ids{} : Ids{box.dims[0].lo, box.dims[0].hi, box.at};
  };
  EXPECT_EQ(held_ids(0, 0), (Ids{0, 6, 0}));
  EXPECT_EQ(held_ids(0, 1), (Ids{6, 10, 0}));
  EXPECT_EQ(held_ids(2, 1), (Ids{0, 2, 4}));
  EXPECT_EQ(held_ids(2, 2), (Ids{2, 7, 0}));
  EXPECT_EQ(held_ids(4, 2), (Ids{0, 1, 5}));
  EXPECT_EQ(held_ids(4, 3), (Ids{1, 5, 0}));
  EXPECT_EQ(held_ids(0, 2), Ids{});
  EXPECT_EQ(local_buffer(flat, 3).numel, 4);
  EXPECT_EQ(local_buffer(flat, 3).padded_numel, 6);
  EXPECT_EQ(flat_layout("zero1", 4, targets, false).flats[0].part, 6);
}

TEST(Layout, RoundRobinOrdersTargetsByRank) {
  const TensorSpec scalar = tensor({1});
  const std::vector<const TensorSpec*> six(6, &scalar);
  EXPECT_EQ(flat_layout("zero2", 4, six, true).flats[0].targets,
            (std::vector<uint32_t>{0, 4, 1, 5, 2, 3}));
  const TensorSpec none = tensor({0, 2});
  const std::vector<const TensorSpec*> some = {&scalar, &none, &scalar, &scalar};
  EXPECT_EQ(flat_layout("zero2", 2, some, true).flats[0].targets,
            (std::vector<uint32_t>{0, 3, 2, 1}));
}

TEST(Layout, EachDtypeHasItsOwnFlatGroup) {
  const TensorSpec low = tensor({3});
  const TensorSpec high{"h", Role::param, DType::f32, {2}};
  const std::vector<const TensorSpec*> targets = {&low, &high, &low};
  const Layout layout = flat_layout("zero1", 2, targets, false);
  ASSERT_EQ(layout.flats.size(), 2U);
  EXPECT_EQ(layout.flats[0].targets, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(layout.flats[1].dtype, DType::f32);
  EXPECT_EQ(layout.flats[1].part, 2);
}

TEST(Layout, Zero3FlattensEachTensor) {
  const TensorSpec matrix = tensor({3, 5}), scalar = tensor({});
  const TensorSpec mask{"mask", Role::buffer, DType::boolean, {4}};
  const std::vector<const TensorSpec*> targets = {&matrix, &scalar, &mask};
  const Layout layout = zero3_layout(4, targets);
  EXPECT_EQ(held_ids(layout.sharding_of(0), matrix, 2), (Ids{8, 9, 10, 11}));
  EXPECT_EQ(local_shape(layout.sharding_of(0), matrix, 3), Ids{3});
  EXPECT_EQ(local_buffer(layout.sharding_of(0), matrix, 3).padded_numel, 4);
  EXPECT_EQ(held_ids(layout.sharding_of(1), scalar, 3), Ids{0});
  EXPECT_EQ(local_shape(layout.sharding_of(2), mask, 3), Ids{4});
}

TEST(Layout, RanksOfABufferClassHaveEqualBuffers) {
  const TensorSpec targets[] = {tensor({7, 5}), tensor({3}), tensor({})};
  for (const Layout& layout :
       {fsdp2_layout(4, 1), tp_fsdp_layout({2}, 3), hsdp_layout(2, {3}, 1)}) {
    for (int a = 0; a < layout.world_size(); ++a) {
      for (int b = 0; b < layout.world_size(); ++b) {
        if (buffer_class(layout, a) != buffer_class(layout, b)) continue;
        for (const TensorSpec& target : targets) {
          EXPECT_EQ(local_buffer(layout.kinds[0], target, a).padded_numel,
                    local_buffer(layout.kinds[0], target, b).padded_numel);
        }
      }
    }
  }
  EXPECT_EQ(buffer_class(tp_fsdp_layout({2}, 3), 0), buffer_class(tp_fsdp_layout({2}, 3), 3));
  EXPECT_NE(buffer_class(tp_fsdp_layout({2}, 3), 0), buffer_class(tp_fsdp_layout({2}, 3), 1));
}

TEST(Layout, InvalidShardingsAreRefused) {
  const auto cut_along = [](std::vector<Cut> cuts) {
    return make_layout("test", {.mesh = {{2, 2}}, .cuts = std::move(cuts)});
  };
  EXPECT_THROW(cut_along({{.axes = {2}}}), Error);
  EXPECT_THROW(cut_along({{.axes = {0}}, {.axes = {0}}}), Error);
  EXPECT_THROW(cut_along({{.axes = {0}, .dim = -1}}), Error);
  EXPECT_THROW(cut_along({{.axes = {0}, .packed = 0}}), Error);
  EXPECT_THROW(whole_layout(0), Error);
}

TEST(Layout, TensorsOfManyDimsAreMergedToFewDims) {
  const TensorSpec target = tensor(std::vector<int64_t>(40, 1));
  EXPECT_EQ(held_ids(fsdp2_layout(2), target, 0), (std::vector<int64_t>{0}));
  EXPECT_EQ(held_ids(fsdp2_layout(2), target, 1), (std::vector<int64_t>{}));
}

// Shards of the packed layout consist of several pieces that alternate in memory.
TEST(Layout, GlobalRunsMapLocalElementsToTheTarget) {
  const Layout plain = fsdp2_layout(3, 1);
  const Layout packed =
      make_layout("test", {.mesh = {{3}}, .cuts = {{.axes = {0}, .dim = 1, .packed = 2}}});
  const TensorSpec target = tensor({4, 7, 2});
  for (const Layout& layout : {plain, packed}) {
    for (int rank = 0; rank < 3; ++rank) {
      const Ids ids = held_ids(layout, target, rank);
      for (int64_t begin = 0; begin < static_cast<int64_t>(ids.size()); begin += 5) {
        const auto end = std::min(begin + 5, static_cast<int64_t>(ids.size()));
        Ids found(ids.size(), -1);
        for_each_piece(layout.kinds[0], target, rank, [&](const Box& piece) {
          for_each_global_run(piece, begin, end, [&](int64_t global, int64_t local, int64_t n) {
            for (int64_t i = 0; i < n; ++i) found.at(static_cast<size_t>(local + i)) = global + i;
          });
        });
        for (int64_t i = 0; i < static_cast<int64_t>(ids.size()); ++i) {
          const auto at = static_cast<size_t>(i);
          EXPECT_EQ(found[at], i >= begin && i < end ? ids[at] : -1);
        }
      }
    }
  }
}

// Catches: a digest over lists without their lengths, where an element could move from one list to
// the next.
TEST(Layout, TheDigestDependsOnWhereAListEnds) {
  const auto digest_of = [](const FlatGroup& flat) {
    Layout layout = whole_layout(2);
    layout.flats = {flat};
    Hasher hasher;
    digest_layout(layout, hasher);
    return hasher.digest();
  };
  EXPECT_EQ(digest_of({.begins = {0}}), digest_of({.begins = {0}}));
  EXPECT_NE(digest_of({.targets = {0, 0}}), digest_of({.begins = {0}}));
}

// Compares runs_of with lists of indices per dim: several packed and uneven cuts, in every order of
// the dims.
TEST(Layout, RunsListARanksElementsInMemoryOrder) {
  const std::vector<int64_t> shape = {7, 5, 3};
  const Sharding sharding =
      make_layout("test", {.mesh = {{2, 3}}, .cuts = {{{1}, 0, 2}, {{0}, 0, 1, true}}}).kinds[0];
  const Sharding across =
      make_layout("test", {.mesh = {{2, 3}}, .cuts = {{{1}, 1, 2}, {{0}, 2}}}).kinds[0];
  std::vector<int> order = {0, 1, 2};
  do {
    for (int rank = 0; rank < 6; ++rank) {
      for (const Sharding* each : {&sharding, &across}) {
        std::vector<Ids> held_indices = {indices(7), indices(5), indices(3)};
        for (const Cut& cut : each->cuts) {
          Ids& along = held_indices[static_cast<size_t>(cut.dim)];
          const bool outer = cut.axes[0] == 0;
          along = cut_by_hand(along, cut.packed, outer ? 2 : 3, outer ? rank / 3 : rank % 3);
        }
        const auto at = [&](size_t place) { return static_cast<size_t>(order[place]); };
        Ids expected = product(held_indices[at(0)], held_indices[at(1)], shape[at(1)]);
        expected = product(expected, held_indices[at(2)], shape[at(2)]);
        Ids got;
        int64_t behind = -1;
        for (const ElementRun& run : runs_of(*each, tensor(shape), rank, order)) {
          EXPECT_GT(run.first, behind) << "runs that touch, or are not ascending";
          for (int64_t i = 0; i < run.n; ++i) got.push_back(run.first + i);
          behind = run.first + run.n;
        }
        ASSERT_EQ(got, expected) << "rank " << rank;
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Layout, AScalarHasOneRunAnEmptyTensorNoneAndInvalidOrdersAreRefused) {
  const Sharding whole = whole_layout(2).kinds[0];
  const Sharding halves = fsdp2_layout(2, 1).kinds[0];
  using Elements = std::vector<ElementRun>;
  EXPECT_EQ(runs_of(whole, tensor({}), 1, {}), (Elements{{0, 1}}));
  EXPECT_EQ(runs_of(whole, tensor({2, 0}), 0, std::vector{0, 1}), Elements{});
  EXPECT_EQ(runs_of(halves, tensor({5}), 1, std::vector{0}), (Elements{{3, 2}}));
  using Order = std::vector<int>;
  for (const Order& order : {Order{}, {0}, {0, 0}, {0, 2}, {0, -1}, {0, 1, 2}}) {
    EXPECT_THROW(runs_of(whole, tensor({2, 3}), 0, order), Error);
  }
}

TEST(Layout, ReplicasHoldEqualElements) {
  const Sharding hsdp = hsdp_layout(2, {3}).kinds[0];
  EXPECT_EQ(replicas_of(hsdp, 4), (std::vector{1, 4}));
  EXPECT_EQ(replicas_of(whole_layout(3).kinds[0], 1), (std::vector{0, 1, 2}));
  const Sharding outer_and_inner{.mesh = {{2, 3, 2}}, .cuts = {{.axes = {1}}}};
  EXPECT_EQ(replicas_of(outer_and_inner, 9), (std::vector{2, 3, 8, 9}));
  Layout layout = make_layout("test", hsdp);
  add_kind(layout, {.mesh = {{2, 3}}, .cuts = {{.axes = {0}}}});
  EXPECT_EQ(replicas_of(layout, 4), (std::vector{4}));
}

}  // namespace
}  // namespace modicum
