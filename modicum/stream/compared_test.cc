// Comparing what ranks read of a checkpoint with its record.
//
// Catches: a chunk that one rank has read whole is not compared; the sums of other ranks are not
// merged; elements that were read twice count as damage, or make another chunk count as compared; a
// chunk of which a part was not read counts as compared; runs are digested at the places of the
// first run.
#include "modicum/stream/compared.h"

#include <gtest/gtest.h>

#include <numeric>

#include "modicum/base/base.h"
#include "modicum/base/error_double.h"
#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

constexpr uint64_t kChunk = kDigestChunkBytes;

// A checkpoint of three tensors in memory: `wide` has 2 1/4 chunks, `codes` has elements below 8
// bits.
struct SavedInMemory {
  explicit SavedInMemory(ChunkSumKind kind = ChunkSumKind::checksum) {
    const std::vector<TensorSpec> specs = {
        {"wide", Role::param, DType::bf16, {9, static_cast<int64_t>(kChunk / 8)}},
        {"small", Role::param, DType::f32, {3, 5}},
        {"codes", Role::param, DType::f4, {6, 8}}};
    manifest = output_manifest({specs});
    manifest.recorded_kind = kind;
    ChunkSums sums(manifest, 3);
    for (uint32_t s = 0; s < manifest.tensors.size(); ++s) {
      std::vector<std::byte>& bytes = values.emplace_back(manifest.tensors[s].at.bytes());
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte((i * 37 + s + i / 251) % 256);
      sums.add(s, 0, bytes);
      for (const ChunkSum& chunk : sums.of_tensor(s)) {
        manifest.recorded.push_back(kind == ChunkSumKind::digest ? chunk.digest : chunk.checksum);
      }
      if (manifest.tensors[s].spec.fqn == "wide") wide = s;
    }
  }

  void add(ComparedChunks& to, uint32_t stored, uint64_t begin, uint64_t end) const {
    to.add(stored, begin, std::span(values[stored]).subspan(begin, end - begin));
  }
  void add_others(ComparedChunks& to) const {
    for (uint32_t s = 0; s < values.size(); ++s) {
      if (s != wide) add(to, s, 0, values[s].size());
    }
  }

  Manifest manifest;
  std::vector<std::vector<std::byte>> values;
  uint32_t wide = 0;
};

ComparedValues merged(const Manifest& manifest,
                      std::initializer_list<const ComparedChunks*> ranks) {
  ComparedChunks all(manifest);
  for (const ComparedChunks* rank : ranks) all.merge(rank->bytes());
  return all.finish();
}

class ComparedKind : public testing::TestWithParam<ChunkSumKind> {};

TEST_P(ComparedKind, AChunkReadWholeIsComparedAtOnce) {
  SavedInMemory saved(GetParam());
  ComparedChunks rank(saved.manifest, "optimizer/");
  saved.add(rank, saved.wide, 0, kChunk);
  rank.compare();
  saved.values[saved.wide][kChunk + 5] ^= std::byte{4};
  saved.add(rank, saved.wide, kChunk, 2 * kChunk - 2);
  rank.compare();  // not whole yet
  saved.add(rank, saved.wide, 2 * kChunk - 2, 2 * kChunk);
  const auto error = error_of([&] { rank.compare(); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::integrity);
  EXPECT_EQ(error->facts().file, "optimizer/model.safetensors");
  EXPECT_EQ(error->what_happened(), "the values are not those that were saved");
  EXPECT_EQ(error->facts().tensor, "wide");
  EXPECT_EQ(error->facts().offset, saved.manifest.tensors[saved.wide].at.begin + kChunk);
}

TEST_P(ComparedKind, ADividedChunkIsComparedOnceAllRanksAreMerged) {
  for (const bool is_damaged : {false, true}) {
    SavedInMemory saved(GetParam());
    const uint64_t all = saved.values[saved.wide].size();
    if (is_damaged) saved.values[saved.wide][3 * kChunk / 2] ^= std::byte{1};
    // Two replicas of two shards, which divide the second chunk.
    ComparedChunks rank0(saved.manifest), rank1(saved.manifest), rank2(saved.manifest),
        rank3(saved.manifest);
    for (ComparedChunks* first : {&rank0, &rank2})
      saved.add(*first, saved.wide, 0, 3 * kChunk / 2 - 8);
    for (ComparedChunks* second : {&rank1, &rank3}) {
      saved.add(*second, saved.wide, 3 * kChunk / 2 - 8, all);
      saved.add_others(*second);
    }
    for (ComparedChunks* rank : {&rank0, &rank1, &rank2, &rank3}) rank->compare();
    const auto merge = [&] { return merged(saved.manifest, {&rank0, &rank1, &rank2, &rank3}); };
    if (is_damaged) {
      const auto error = error_of([&] { merge(); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->category(), Category::integrity);
      EXPECT_EQ(error->facts().tensor, "wide");
      continue;
    }
    const ComparedValues values = merge();
    EXPECT_EQ(values.bytes, saved.manifest.data_bytes());
    EXPECT_TRUE(values.not_compared.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, ComparedKind,
                         testing::Values(ChunkSumKind::digest, ChunkSumKind::checksum));

TEST(ComparedChunks, OtherMultiplicitiesAndPartsAreReportedNotRefused) {
  const SavedInMemory saved;
  const uint64_t all = saved.values[saved.wide].size();
  ComparedChunks rank0(saved.manifest), rank1(saved.manifest);
  saved.add(rank0, saved.wide, 0, kChunk / 2);
  saved.add(rank1, saved.wide, kChunk / 4, kChunk);  // overlaps with that of rank 0
  saved.add(rank1, saved.wide, 2 * kChunk, all);
  saved.add(rank1, saved.wide, kChunk, 2 * kChunk - 2);
  saved.add(rank0, saved.wide, kChunk, kChunk + 2);  // as many elements as the chunk has
  saved.add_others(rank0);
  for (ComparedChunks* rank : {&rank0, &rank1}) rank->compare();
  const ComparedValues values = merged(saved.manifest, {&rank0, &rank1});
  EXPECT_EQ(values.bytes, saved.manifest.data_bytes() - 2 * kChunk);
  EXPECT_EQ(values.not_compared, std::vector<std::string>{"wide"});
}

// Read whole by one rank, and only in part by another: what the other has is not compared.
TEST(ComparedChunks, APartThatIsNotComparedCountsBesideAWholeChunk) {
  const SavedInMemory saved;
  ComparedChunks rank0(saved.manifest), rank1(saved.manifest);
  saved.add(rank0, saved.wide, 0, saved.values[saved.wide].size());
  saved.add_others(rank0);
  saved.add(rank1, saved.wide, 4, 400);
  for (ComparedChunks* rank : {&rank0, &rank1}) rank->compare();
  EXPECT_TRUE(merged(saved.manifest, {&rank0}).not_compared.empty());
  EXPECT_EQ(merged(saved.manifest, {&rank0, &rank1}).not_compared,
            std::vector<std::string>{"wide"});
}

// Columns of a matrix: runs with gaps, some of which cross the end of a chunk.
TEST(ComparedChunks, RunsWithGapsAreDigestedAtTheirPlaces) {
  const SavedInMemory saved;
  for (uint32_t s = 0; s < saved.values.size(); ++s) {
    const TensorSpec& spec = saved.manifest.tensors[s].spec;
    const int64_t rows = spec.shape[0], columns = spec.shape[1];
    const int64_t cut = spec.dtype == DType::f4 ? 2 : columns / 3;
    ComparedChunks whole(saved.manifest);
    for (const auto& [first, length] : {std::pair(int64_t{0}, cut), {cut, columns - cut}}) {
      const Transfer part{
          .from = s,
          .from_dtype = spec.dtype,
          .to_dtype = spec.dtype,
          .runs = {.first = first, .stride = columns, .count = rows, .length = length}};
      whole.add(part, saved.values[s].data() + bytes_of(spec.dtype, first));
    }
    whole.compare();
    const std::vector<std::string> names = merged(saved.manifest, {&whole}).not_compared;
    EXPECT_EQ(names.size(), 2U);
    EXPECT_EQ(std::count(names.begin(), names.end(), spec.fqn), 0) << spec.fqn;
  }
}

TEST(ComparedChunks, BytesOfAnotherCheckpointAreRefused) {
  const SavedInMemory saved;
  ComparedChunks all(saved.manifest), rank(saved.manifest);
  saved.add(rank, saved.wide, 0, kChunk);
  saved.add(rank, saved.wide, kChunk, kChunk + 64);
  rank.compare();
  const std::vector<std::byte> bytes = rank.bytes();
  for (const size_t size : {size_t{0}, size_t{7}, size_t{12}, bytes.size() - 1}) {
    const auto error = error_of([&] { all.merge(std::span(bytes).first(size)); });
    ASSERT_TRUE(error) << size;
    EXPECT_EQ(error->category(), Category::integrity);
  }
  for (const size_t word : {0U, 1U, 2U}) {  // the number of ranges, and a range
    std::vector<std::byte> wrong = bytes;
    wrong[8 * word + 6] = std::byte{0xff};
    EXPECT_TRUE(error_of([&] { all.merge(wrong); })) << word;
  }
}

TEST(ComparedChunks, TheRestOfAChunkIsReadOnceMore) {
  for (const bool is_damaged : {false, true}) {
    SavedInMemory saved;
    if (is_damaged) saved.values[saved.wide][100] ^= std::byte{1};
    MemoryFileSystem files;
    files.make_directory("/m");
    const auto file = files.create("/m/model.safetensors");
    const std::string header = output_header(saved.manifest, 0);
    file->write(std::as_bytes(std::span(header)), 0);
    for (uint32_t s = 0; s < saved.values.size(); ++s) {
      file->write(saved.values[s], saved.manifest.tensors[s].at.begin);
    }
    file->close();
    Checkpoint checkpoint = open_checkpoint(files, "/m");
    checkpoint.manifest.recorded = saved.manifest.recorded;
    ComparedChunks rank(checkpoint.manifest);
    saved.add(rank, saved.wide, 2000, 4000);
    rank.compare();
    EXPECT_TRUE(rank.has_rest());
    std::vector<std::byte> room(1 * kMiB);
    if (is_damaged) {
      EXPECT_TRUE(error_of([&] { rank.compare_rest(checkpoint, room); }));
      continue;
    }
    EXPECT_EQ(rank.compare_rest(checkpoint, room), kChunk);
    EXPECT_EQ(rank.finish().bytes, kChunk);
  }
}

// Catches: the promise lacks what a rank holds to compare.
TEST(ComparedChunks, ItsMemoryIsCounted) {
  const SavedInMemory saved;
  Manifest plain = saved.manifest;
  plain.recorded = {};
  const uint64_t counted = saved.manifest.held_bytes() - plain.held_bytes();
  ComparedChunks rank(saved.manifest);
  saved.add(rank, saved.wide, 2, 4 * kMiB);
  EXPECT_LE(rank.bytes().size() + sizeof(uint64_t), saved.manifest.handed_over_bytes());
  EXPECT_GE(counted, ChunkSums::held_bytes(saved.manifest) +
                         saved.manifest.recorded.size() * sizeof(uint64_t) +
                         saved.manifest.handed_over_bytes());
}

}  // namespace
}  // namespace modicum
