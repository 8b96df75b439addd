#include "modicum/stream/reader.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "modicum/io/file_doubles.h"

namespace modicum {
namespace {

constexpr uint64_t kWindow = 8 * kMiB;  // as in reader.cc
using Windows = std::vector<std::pair<char, uint64_t>>;

// A checkpoint of two data files, each with one tensor of `bytes` bytes. Every 4099th byte is a
// mark that depends on its place and on the tensor; all others are zero.
struct Files {
  explicit Files(int64_t bytes) {
    memory.make_directory("/m");
    std::vector<std::pair<std::string, std::string>> rows;
    for (const char* name : {"a", "b"}) {
      const TensorSpec spec{name, Role::param, DType::u8, {bytes}};
      const std::string file = std::string(name) + ".safetensors";
      SafetensorsWriter out(memory, "/m/" + file, {&spec, 1});
      for (int64_t at = 0; at < bytes; at += 4099) {
        const std::byte mark{static_cast<unsigned char>(at / 4099 + name[0])};
        out.write(0, static_cast<uint64_t>(at), {&mark, 1});
      }
      out.finish();
      rows.emplace_back(name, file);
    }
    const std::string index = index_json(rows, 2 * static_cast<uint64_t>(bytes));
    memory.put("/m/model.safetensors.index.json", index);
    checkpoint = open_checkpoint(recorded, "/m");
    opened = recorded.calls().size();
  }

  // Reads bytes [begin, end) of a file's tensor, `piece` bytes at a time. Returns whether every
  // byte is right.
  bool read(DataReader& reader, uint32_t file, uint64_t begin, uint64_t end, uint64_t piece) {
    const StoredTensor& stored = checkpoint.manifest.tensors[file];
    bool right = true;
    for (uint64_t at = begin; at < end; at += piece) {
      std::vector<std::byte> bytes(std::min(piece, end - at), std::byte{0xff});
      reader.read(file, stored.at.begin + at, bytes);
      for (size_t i = 0; i < bytes.size(); ++i) {
        const uint64_t place = at + i;
        const auto mark = static_cast<unsigned char>(place / 4099 + stored.spec.fqn[0]);
        right &= bytes[i] == (place % 4099 == 0 ? std::byte{mark} : std::byte{});
      }
    }
    return right;
  }

  // The dropped windows, in order, as {first letter of the file, index}. Fails if one was dropped
  // only in part.
  std::vector<std::pair<char, uint64_t>> dropped() const {
    std::vector<std::pair<char, uint64_t>> windows;
    for (const IoCall& call : recorded.drops()) {
      EXPECT_EQ(call.begin % kWindow, 0U);
      EXPECT_EQ(call.end, call.begin + kWindow);
      windows.emplace_back(call.file[0], call.begin / kWindow);
    }
    return windows;
  }

  MemoryFileSystem memory;
  RecordingFileSystem recorded{memory};
  Checkpoint checkpoint;
  size_t opened = 0;  // number of calls that opened the checkpoint
};

// Catches: a reader that never drops the page cache, or drops it while slower ranks still need it.
TEST(DataReader, DropsTheCacheSomeWindowsBehindTheReads) {
  constexpr uint64_t kLast = DataReader::kWindowsBehind + 1;
  Files files(static_cast<int64_t>((kLast + 1) * kWindow));
  files.recorded.be_cold();
  Windows all;
  {
    DataReader reader(files.checkpoint);
    for (uint64_t window = 0; window <= kLast; ++window) {
      EXPECT_EQ(files.dropped(), Windows{});
      EXPECT_TRUE(files.read(reader, 0, window * kWindow, window * kWindow + 5000, 1000));
      all.emplace_back('a', window);
    }
    EXPECT_EQ(files.dropped(), (Windows{{'a', 0}}));
    EXPECT_EQ(reader.bytes_read(), (kLast + 1) * 5000);
    EXPECT_EQ(reader.page_cache_peak_bytes(), kLast * 5000);
  }
  EXPECT_EQ(files.dropped(), all);
}

// Catches: a reader that keeps the pages of the kernel's read-ahead as if they had been cached
// before the load.
TEST(DataReader, DropsReadAhead) {
  Files files(20 << 20);
  files.recorded.be_cold();
  {
    DataReader reader(files.checkpoint);
    EXPECT_TRUE(files.read(reader, 0, 0, 20 << 20, 1 << 20));
  }
  EXPECT_EQ(files.dropped(), (Windows{{'a', 0}, {'a', 1}, {'a', 2}}));
}

TEST(DataReader, LeavesNothingOfAFileInTheCache) {
  Files files(9 << 20);
  files.recorded.be_cold();
  DataReader reader(files.checkpoint);
  EXPECT_TRUE(files.read(reader, 0, 0, 9 << 20, 1 << 20));
  EXPECT_TRUE(files.read(reader, 1, 0, 5, 5));
  EXPECT_EQ(files.dropped(), (Windows{{'a', 0}, {'a', 1}}));
}

TEST(DataReader, KeepsWindowsThatWereCachedBefore) {
  Files files(20 << 20);
  {
    DataReader reader(files.checkpoint);
    EXPECT_TRUE(files.read(reader, 0, 0, 20 << 20, 1 << 20));
    EXPECT_EQ(reader.page_cache_peak_bytes(), 0U);
  }
  EXPECT_EQ(files.dropped(), Windows{});
}

TEST(DataReader, SeekingBackCountsEachReadOnce) {
  Files files(20 << 20);
  files.recorded.be_cold();
  {
    DataReader reader(files.checkpoint);
    for (const uint64_t at : {uint64_t{0}, 9 * kMiB, kMiB, 17 * kMiB, kMiB}) {
      EXPECT_TRUE(files.read(reader, 0, at, at + kMiB, kMiB));
    }
    EXPECT_EQ(reader.page_cache_peak_bytes(), 5 * kMiB);
  }
  EXPECT_EQ(files.dropped(), (Windows{{'a', 0}, {'a', 1}, {'a', 0}, {'a', 2}, {'a', 0}}));
}

// Catches: bytes that other ranks also need are read around the page cache; bytes that are in the
// page cache are read from the storage again.
TEST(DataReader, ReadsAroundThePageCacheWhatNoOtherRankNeeds) {
  Files files(20 << 20);
  files.recorded.be_cold();
  std::vector<std::byte> room(64 * kKiB), out(3 * kMiB);
  DataReader reader(files.checkpoint, {.room = room});
  const uint64_t data = files.checkpoint.manifest.tensors[0].at.begin;
  reader.read(0, data + 7 * kMiB, out, true);
  EXPECT_EQ(out[(7 * kMiB / 4099 + 1) * 4099 - 7 * kMiB],
            std::byte{static_cast<unsigned char>(7 * kMiB / 4099 + 1 + 'a')});
  EXPECT_EQ(reader.page_cache_peak_bytes(), 0U);
  reader.read(0, data, out, false);
  reader.read(0, data + 12 * kMiB, out, true);  // cached: be_cold reads the whole file ahead
  const auto around = files.recorded.reads_around();
  ASSERT_EQ(around.size(), 1U);
  EXPECT_EQ(around[0].begin, data + 7 * kMiB);
  EXPECT_EQ(around[0].end, data + 10 * kMiB);
  EXPECT_EQ(reader.page_cache_peak_bytes(), 6 * kMiB);
  EXPECT_EQ(reader.bytes_read(), 9 * kMiB);
}

// A plan counts each read as one call, even if the read crosses windows.
TEST(DataReader, MakesOneCallPerRead) {
  Files files(20 << 20);
  files.recorded.be_cold();
  DataReader reader(files.checkpoint);
  EXPECT_TRUE(files.read(reader, 0, 7 << 20, 19 << 20, 4 << 20));
  EXPECT_EQ(reader.page_cache_peak_bytes(), 12U << 20);
  const auto calls = files.recorded.calls();
  uint64_t next = files.checkpoint.manifest.tensors[0].at.begin + (7 << 20);
  for (size_t i = files.opened; i < calls.size(); ++i) {
    if (calls[i].what != "read") continue;
    EXPECT_EQ(calls[i].begin, next);
    EXPECT_EQ(calls[i].end, next + (4 << 20));
    next = calls[i].end;
  }
  EXPECT_EQ(next, files.checkpoint.manifest.tensors[0].at.begin + (19 << 20));
}

}  // namespace
}  // namespace modicum
