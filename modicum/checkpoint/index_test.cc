#include <gtest/gtest.h>

#include "modicum/checkpoint/test_files_doubles.h"
#include "modicum/json/json_values_double.h"

namespace modicum {
namespace {

using std::literals::operator""s;

constexpr const char* kIndex = "/m/model.safetensors.index.json";

// Two shards, tensors a and b in the first, c in the second.
void put_shards(MemoryFileSystem& files) {
  files.put("/m/one.safetensors", file_with({{"a", 2}, {"b", 3}}));
  files.put("/m/two.safetensors", file_with({{"c", 4}}));
}

const std::map<std::string, std::string> kMap = {
    {"a", "one.safetensors"}, {"b", "one.safetensors"}, {"c", "two.safetensors"}};

std::optional<Error> failure_of(const std::string& index) {
  MemoryFileSystem files;
  put_shards(files);
  files.put(kIndex, index);
  return failure(files, "/m");
}

TEST(Index, AllShardsMakeOneManifest) {
  MemoryFileSystem files;
  put_shards(files);
  files.put(kIndex, index_with(kMap, 9));
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  const Manifest& manifest = checkpoint.manifest;
  ASSERT_EQ(manifest.files.size(), 2U);
  EXPECT_EQ(manifest.files[0].name, "one.safetensors");
  ASSERT_EQ(manifest.tensors.size(), 3U);
  EXPECT_EQ(manifest.tensors[2].spec.fqn, "c");
  EXPECT_EQ(manifest.tensors[2].at.file, 1U);
  EXPECT_TRUE(checkpoint.warnings.empty());
}

TEST(Index, OnlyHeadersAndTheIndexAreRead) {
  MemoryFileSystem files;
  put_shards(files);
  files.put(kIndex, index_with(kMap, 9));
  const std::string config = R"({"model_type":"x"})";
  files.put("/m/config.json", config);
  RecordingFileSystem recording(files);
  uint64_t expected_bytes = files.get(kIndex).size() + config.size();
  for (const DataFile& file : open_checkpoint(recording, "/m").manifest.files) {
    expected_bytes += file.header_bytes;
  }
  EXPECT_EQ(recording.bytes_read(), expected_bytes);
}

TEST(Index, FilesAreInTheOrderOfTheirNames) {
  MemoryFileSystem files;
  put_shards(files);
  files.put(
      kIndex,
      R"({"weight_map":{"c":"two.safetensors","b":"one.safetensors","a":"one.safetensors"}})");
  const Manifest manifest = open_checkpoint(files, "/m").manifest;
  EXPECT_EQ(manifest.files[0].name, "one.safetensors");
  EXPECT_EQ(manifest.tensors[0].spec.fqn, "a");
}

TEST(Index, InvalidIndexesAreRefused) {
  struct InvalidIndex {
    std::string index;
    Category category;
    std::string tensor = "";
  };
  const std::vector<InvalidIndex> cases = {
      {"", Category::index_json},
      {"{", Category::index_json},
      {"{\"weight_map\":{}}x", Category::index_json},
      {"{\"weight_map\":{\"a\xff\":\"one.safetensors\"}}", Category::index_json},
      {"[]", Category::index_schema},
      {"{}", Category::index_schema},
      {"{\"weight_map\":{}}", Category::index_schema},
      {"{\"weight_map\":null}", Category::index_schema},
      {"{\"weight_map\":[\"a\"]}", Category::index_schema},
      {"{\"weight_map\":{\"a\":1}}", Category::index_schema, "a"},
      {"{\"weight_map\":{\"a\":null}}", Category::index_schema, "a"},
      {"{\"weight_map\":{\"a\":[\"one.safetensors\"]}}", Category::index_schema, "a"},
      {"{\"metadata\":7,\"weight_map\":{\"a\":\"one.safetensors\"}}", Category::index_schema},
      {"{\"weight_map\":{\"a\":\"one.safetensors\",\"\\u0061\":\"one.safetensors\"}}",
       Category::index_dup},
      {"{\"weight_map\":{\"a\":\"one.safetensors\"},\"weight_map\":{}}", Category::index_dup},
  };
  for (const InvalidIndex& bad : cases) {
    const auto error = failure_of(bad.index);
    ASSERT_TRUE(error) << bad.index;
    EXPECT_EQ(category_name(error->category()), category_name(bad.category))
        << bad.index << ": " << error->what();
    EXPECT_EQ(error->facts().file, "model.safetensors.index.json") << bad.index;
    EXPECT_EQ(error->facts().tensor, bad.tensor) << bad.index;
  }
}

TEST(Index, InvalidShardNamesAreRefusedBeforeAnyShardIsOpened) {
  const std::vector<std::string> names = {"../one.safetensors",
                                          "/m/one.safetensors",
                                          "sub/one.safetensors",
                                          "..\\one.safetensors",
                                          "one.safetensors/",
                                          "./one.safetensors",
                                          ".",
                                          "..",
                                          "",
                                          "one.bin",
                                          "one.safetensors.bin",
                                          "one.safetensors\0"s,
                                          "one\0.safetensors"s,
                                          "one\n.safetensors",
                                          std::string(245, 'n') + ".safetensors"};
  for (const std::string& name : names) {
    MemoryFileSystem files;
    put_shards(files);
    files.put(kIndex, index_with({{"a", "one.safetensors"}, {"b", name}}, 5));
    RecordingFileSystem recording(files);
    const auto error = failure(recording, "/m");
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->category(), Category::index_path) << error->what();
    EXPECT_EQ(error->facts().tensor, "b");
    for (const IoCall& call : recording.calls()) {
      EXPECT_TRUE(call.what != "open" || call.file == "model.safetensors.index.json") << call.file;
    }
  }
}

TEST(Index, TheErrorNamesAllMissingShards) {
  const auto error = failure_of(index_with(
      {{"a", "one.safetensors"}, {"x", "lost.safetensors"}, {"y", "gone.safetensors"}}, 0));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::index_missing_shard);
  EXPECT_NE(error->what_happened().find("gone.safetensors, lost.safetensors"), std::string::npos);
  EXPECT_EQ(error->facts().file, "gone.safetensors");
}

TEST(Index, ATensorMissingFromItsShardIsRefused) {
  for (const char* shard : {"one.safetensors", "two.safetensors"}) {
    const auto error = failure_of(index_with({{"a", "one.safetensors"}, {"nope", shard}}, 5));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->category(), Category::index_missing_tensor);
    EXPECT_EQ(error->facts().tensor, "nope");
    EXPECT_EQ(error->facts().file, shard);
  }
  const auto elsewhere = failure_of(index_with(
      {{"a", "two.safetensors"}, {"b", "one.safetensors"}, {"c", "two.safetensors"}}, 9));
  ASSERT_TRUE(elsewhere);
  EXPECT_EQ(elsewhere->category(), Category::index_missing_tensor);
  EXPECT_EQ(elsewhere->facts().tensor, "a");
  EXPECT_EQ(elsewhere->facts().file, "two.safetensors");
  EXPECT_NE(elsewhere->what_happened().find("one.safetensors"), std::string::npos);
}

TEST(Index, TensorInTwoShardsIsRefused) {
  MemoryFileSystem files;
  put_shards(files);
  files.put("/m/three.safetensors", file_with({{"d", 1}, {"a", 2}}));
  auto map = kMap;
  map["d"] = "three.safetensors";
  files.put(kIndex, index_with(map, 10));
  const auto error = failure(files, "/m");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::index_dup);
  EXPECT_EQ(error->facts().tensor, "a");
}

TEST(Index, TheErrorNamesTheInvalidShard) {
  MemoryFileSystem files;
  put_shards(files);
  files.put("/m/two.safetensors", "short");
  files.put(kIndex, index_with(kMap, 9));
  const auto error = failure(files, "/m");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->category(), Category::format_trunc);
  EXPECT_EQ(error->facts().file, "two.safetensors");
}

TEST(Index, UnmappedTensorsAndWrongTotalsAreWarnings) {
  MemoryFileSystem files;
  put_shards(files);
  files.put(kIndex, index_with({{"b", "one.safetensors"}, {"c", "two.safetensors"}}, 8));
  const Checkpoint checkpoint = open_checkpoint(files, "/m");
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 3U);
  ASSERT_EQ(checkpoint.warnings.size(), 2U);
  EXPECT_EQ(checkpoint.warnings[0], "one.safetensors: not in the index: 1 tensor; the first is a");
  EXPECT_NE(checkpoint.warnings[1].find("total_size is 8"), std::string::npos);
  for (const char* total : {"9.0", "\"9\"", "-1", "1e3", "null", "9223372036854775808"}) {
    files.put(kIndex, std::string(R"({"metadata":{"total_size":)") + total +
                          R"(,"x":[1]},"weight_map":{"a":"one.safetensors",)"
                          R"("b":"one.safetensors","c":"two.safetensors"},"other":{}})");
    EXPECT_EQ(open_checkpoint(files, "/m").warnings.size(), 1U) << total;
  }
}

TEST(Index, TruncationsAndMutationsAreErrorsOrValid) {
  MemoryFileSystem files;
  put_shards(files);
  const std::string index = index_with(kMap, 9);
  for (size_t length = 0; length < index.size(); ++length) {
    files.put(kIndex, index.substr(0, length));
    const auto error = failure(files, "/m");
    ASSERT_TRUE(error);
    EXPECT_EQ(error->category(), Category::index_json);
  }
  int accepted = 0;
  for (size_t at = 0; at < index.size(); ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string mutated = index;
      mutated[at] = static_cast<char>(byte);
      files.put(kIndex, mutated);
      const auto error = failure(files, "/m");
      if (!error) ++accepted;
      ASSERT_TRUE(!error || exit_code(error->category()) == 11) << error->what();  // INDEX.*
    }
  }
  EXPECT_GT(accepted, 0);
}

// Every JSON value in each place of an index is read, or refused as INDEX.*.
TEST(Index, AnyJsonAtAnyKeyIsReadOrRefused) {
  const std::string map = R"("weight_map": {"a": "one.safetensors", "b": "one.safetensors"})";
  for (const char* value : kJsonValues) {
    for (const std::string& index :
         {std::string(value), R"({"weight_map": )" + std::string(value) + "}",
          R"({"weight_map": {"a": )" + std::string(value) + "}}",
          R"({"metadata": )" + std::string(value) + ", " + map + "}",
          R"({"metadata": {"total_size": )" + std::string(value) + "}, " + map + "}",
          R"({"metadata": {"unknown": )" + std::string(value) + "}, " + map + "}",
          R"({"unknown": )" + std::string(value) + ", " + map + "}"}) {
      const auto error = failure_of(index);
      if (error) {
        EXPECT_EQ(exit_code(error->category()), 11) << index << ": " << error->what();
      }
    }
  }
}

}  // namespace
}  // namespace modicum
