#include <gtest/gtest.h>

#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

constexpr const char* kPath = "/m/model.safetensors";

std::vector<std::byte> bytes_of_text(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TensorSpec spec(std::string fqn, DType dtype, std::vector<int64_t> shape) {
  TensorSpec tensor;
  tensor.fqn = std::move(fqn);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

MemoryFileSystem& with_directory(MemoryFileSystem& files) {
  files.make_directory("/m");
  return files;
}

TEST(Writer, BytesAreWrittenWhereTheHeaderPlacesThem) {
  MemoryFileSystem files;
  const std::vector<TensorSpec> tensors = {spec("b", DType::u8, {3}), spec("a", DType::f16, {})};
  SafetensorsWriter writer(with_directory(files), kPath, tensors, {{"format", "pt"}});
  EXPECT_EQ(writer.data_bytes(), 5U);
  writer.write(1, 0, bytes_of_text("XY"));
  writer.write(0, 1, bytes_of_text("bc"));
  writer.write(0, 0, bytes_of_text("a"));
  writer.finish();
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
      R"("a":{"dtype":"F16","shape":[],"data_offsets":[3,5]}})";
  const std::string header = json + std::string((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(files.get(kPath), file_bytes(header, 0) + "abcXY");
}

TEST(Writer, AWrittenFileIsReadBack) {
  MemoryFileSystem files;
  std::vector<TensorSpec> tensors = {spec("model.\u00e9\"\\", DType::bf16, {2, 3}),
                                     spec("empty", DType::f32, {0, 7}),
                                     spec("scalar", DType::i64, {}),
                                     spec("half", DType::f4, {4}),
                                     spec("odd", DType::u8, {3}),
                                     spec("after", DType::f64, {1})};
  SafetensorsWriter writer(with_directory(files), kPath, tensors);
  writer.finish();
  const Manifest manifest = open_checkpoint(files, kPath).manifest;
  ASSERT_EQ(manifest.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(manifest.tensors[i].spec, tensors[i]);
  EXPECT_EQ(manifest.files[0].header_bytes % 8, 0U);
  EXPECT_EQ(manifest.data_bytes(), writer.data_bytes());
}

TEST(Writer, BytesNeverWrittenAreZeroAndFinishIsDurable) {
  MemoryFileSystem files;
  const std::vector<TensorSpec> tensors = {spec("t", DType::u8, {4})};
  SafetensorsWriter writer(with_directory(files), kPath, tensors);
  writer.finish();
  files.sync_directory("/");
  files.sync_directory("/m");
  files.lose_unsynced();
  EXPECT_EQ(files.get(kPath).substr(files.get(kPath).size() - 4), std::string(4, '\0'));
}

TEST(Writer, AFileWithoutTensorsIsValid) {
  MemoryFileSystem files;
  SafetensorsWriter(with_directory(files), kPath, {}).finish();
  EXPECT_EQ(files.get(kPath), file_bytes("{}      ", 0));
  EXPECT_FALSE(failure(files, kPath));
}

TEST(Writer, RefusesWhatOpenCheckpointWouldRefuse) {
  MemoryFileSystem files;
  with_directory(files);
  auto category = [&](const std::vector<TensorSpec>& tensors) {
    try {
      const SafetensorsWriter writer(files, kPath, tensors);
    } catch (const Error& error) {
      return error.category();
    }
    return Category::count;
  };
  EXPECT_EQ(category({spec("", DType::u8, {1})}), Category::format_name);
  EXPECT_EQ(category({spec("__metadata__", DType::u8, {1})}), Category::format_name);
  EXPECT_EQ(category({spec("t", DType::u8, {1}), spec("t", DType::u8, {1})}), Category::format_dup);
  EXPECT_EQ(category({spec("t", DType::f4, {3})}), Category::format_align);
  EXPECT_EQ(category({spec("t", DType::f32, {int64_t{1} << 62})}), Category::format_overflow);
  EXPECT_EQ(category({spec("t", DType::u8, {-1})}), Category::internal);
  EXPECT_FALSE(files.exists(kPath));
  files.put(kPath, "there");
  EXPECT_EQ(category({spec("t", DType::u8, {1})}), Category::conflict);
}

TEST(Writer, WritesOutsideATensorAreRefused) {
  MemoryFileSystem files;
  const std::vector<TensorSpec> tensors = {spec("t", DType::u8, {4}), spec("u", DType::u8, {4})};
  SafetensorsWriter writer(with_directory(files), kPath, tensors);
  EXPECT_THROW(writer.write(2, 0, {}), Error);
  EXPECT_THROW(writer.write(0, 3, bytes_of_text("xy")), Error);
  EXPECT_THROW(writer.write(0, 5, {}), Error);
}

TEST(Writer, AnIndexIsReadBack) {
  MemoryFileSystem files;
  files.put("/m/x.safetensors", file_with({{"a", 2}}));
  files.put("/m/y.safetensors", file_with({{"b", 3}}));
  const std::string text = index_with({{"a", "x.safetensors"}, {"b", "y.safetensors"}}, 5);
  EXPECT_EQ(text, R"({"metadata":{"total_size":5},)"
                  R"("weight_map":{"a":"x.safetensors","b":"y.safetensors"}})");
  files.put("/m/model.safetensors.index.json", text);
  EXPECT_TRUE(open_checkpoint(files, "/m").warnings.empty());
}

}  // namespace
}  // namespace modicum
