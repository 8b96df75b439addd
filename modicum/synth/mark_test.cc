#include "modicum/synth/mark.h"

#include <gtest/gtest.h>

#include "modicum/base/base.h"
#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

TensorSpec tensor(DType dtype, std::vector<int64_t> shape) {
  return {"t", Role::param, dtype, std::move(shape)};
}

std::vector<ElementRange> written(const SynthMark& mark, const TensorSpec& spec) {
  return synth_written(mark, spec, 0, numel_of(spec.shape));
}

TEST(SynthMark, SurvivesARoundTrip) {
  for (const SynthMark& mark :
       {SynthMark{}, SynthMark{true, {}}, SynthMark{true, {2, 4}}, SynthMark{true, {1024}}}) {
    EXPECT_EQ(synth_mark(synth_metadata(mark)), mark);
  }
  const auto metadata = synth_metadata({true, {2, 4}});
  EXPECT_EQ(metadata.at("format"), "pt");
  EXPECT_EQ(metadata.at("modicum.synth"), "sparse");
  EXPECT_EQ(metadata.at("modicum.synth.edges"), "2,4");
  EXPECT_EQ(synth_metadata({}).at("modicum.synth"), "1");
}

TEST(SynthMark, IsEmptyForUnknownMetadata) {
  EXPECT_FALSE(synth_mark({}));
  EXPECT_FALSE(synth_mark({{"format", "pt"}}));
  EXPECT_FALSE(synth_mark({{"modicum.synth", "2"}}));
  EXPECT_FALSE(synth_mark({{"modicum.synth", "1"}, {"modicum.synth.edges", "2"}}));
  for (const char* edges : {"", ",", "2,", ",2", "0", "-1", "2, 4", "x", "99999999999999999999"}) {
    EXPECT_FALSE(synth_mark({{"modicum.synth", "sparse"}, {"modicum.synth.edges", edges}}));
  }
}

TEST(SynthWritten, IsEverythingUnlessSparse) {
  EXPECT_EQ(written({}, tensor(DType::f32, {10, 10})), (std::vector<ElementRange>{{0, 100}}));
  EXPECT_TRUE(written({}, tensor(DType::f32, {0, 10})).empty());
}

TEST(SynthWritten, IsTheFirstPageAndTheShardBoundaries) {
  // 100,000 rows of 8 bytes; 4096 bytes are 1024 elements. World size 4 has a boundary every 25,000
  // rows, which are 50,000 elements.
  const TensorSpec spec = tensor(DType::f32, {100'000, 2});
  EXPECT_EQ(written({true, {}}, spec), (std::vector<ElementRange>{{0, 1024}}));
  EXPECT_EQ(written({true, {4}}, spec),
            (std::vector<ElementRange>{
                {0, 1024}, {49'488, 50'512}, {99'488, 100'512}, {149'488, 150'512}}));
  EXPECT_EQ(written({true, {2, 4}}, spec), written({true, {4}}, spec));
  EXPECT_EQ(written({true, {1}}, spec), written({true, {}}, spec));
}

TEST(SynthWritten, BoundariesAreThoseOfShard0) {
  // The first tensor has ceil(100,001 / 3) = 33,334 rows per shard. The second has ceil(5 / 4) = 2:
  // the last of four ranks has none, so there are two boundaries.
  EXPECT_EQ(written({true, {3}}, tensor(DType::u8, {100'001}))[1],
            (ElementRange{33'334 - 2048, 33'334 + 2048}));
  EXPECT_EQ(written({true, {4}}, tensor(DType::u8, {5, 100'000})).size(), 3U);
}

TEST(SynthWritten, SmallTensorsAreWrittenWhole) {
  EXPECT_EQ(written({true, {2, 4}}, tensor(DType::bf16, {6, 5})),
            (std::vector<ElementRange>{{0, 30}}));
  EXPECT_EQ(written({true, {2}}, tensor(DType::f32, {})), (std::vector<ElementRange>{{0, 1}}));
  EXPECT_TRUE(written({true, {2}}, tensor(DType::f32, {0})).empty());
  EXPECT_TRUE(written({true, {2}}, tensor(DType::f32, {7, 0})).empty());
}

// The result for a range equals the result for the whole tensor, clipped to the range.
TEST(SynthWritten, OfARangeIsThatOfTheTensorClipped) {
  const SynthMark mark{true, {2, 3, 7, 64}};
  for (const DType dtype : {DType::u8, DType::f4, DType::f6_e2m3, DType::f64}) {
    const TensorSpec spec = tensor(dtype, {1003, 36});
    const int64_t numel = numel_of(spec.shape);
    const auto whole = written(mark, spec);
    for (int64_t first = 0; first < numel; first += 1236) {
      for (const int64_t n : {int64_t{4}, int64_t{400}, numel - first}) {
        if (n > numel - first) continue;
        std::vector<ElementRange> clipped;
        for (const ElementRange& range : whole) {
          const ElementRange part = {std::max(range.begin, first), std::min(range.end, first + n)};
          if (part.begin < part.end) clipped.push_back(part);
        }
        ASSERT_EQ(synth_written(mark, spec, first, n), clipped);
      }
    }
  }
}

TEST(SynthExpected, IsValuesWhereWrittenAndZerosElsewhere) {
  const TensorSpec spec = tensor(DType::f32, {100'000, 2});
  std::vector<std::byte> all(800'000);
  synth_fill(name_hash("t"), DType::f32, 0, 200'000, all.data());
  std::vector<std::byte> dense(40'000, std::byte{0xab});
  synth_expected({}, spec, 45'000, 10'000, dense.data());
  EXPECT_TRUE(std::equal(dense.begin(), dense.end(), all.begin() + 180'000));
  std::vector<std::byte> sparse(40'000, std::byte{0xab});
  synth_expected({true, {4}}, spec, 45'000, 10'000, sparse.data());
  for (size_t i = 0; i < sparse.size(); ++i) {
    const size_t element = 45'000 + i / 4;
    const bool is_written = element >= 49'488 && element < 50'512;
    ASSERT_EQ(sparse[i], is_written ? dense[i] : std::byte{0});
  }
}

TEST(SynthExpected, HandlesAnyPieceOfAPackedTensor) {
  const TensorSpec spec = tensor(DType::f6_e3m2, {40'000});
  const SynthMark mark{true, {3}};
  std::vector<std::byte> whole(30'000);
  synth_expected(mark, spec, 0, 40'000, whole.data());
  for (int64_t first = 0; first < 40'000; first += 500) {
    std::vector<std::byte> piece(375);
    synth_expected(mark, spec, first, 500, piece.data());
    ASSERT_TRUE(std::equal(piece.begin(), piece.end(), whole.begin() + first / 4 * 3));
  }
}

}  // namespace
}  // namespace modicum
