#include <gtest/gtest.h>

#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

TensorSpec spec(std::string fqn, DType dtype, std::vector<int64_t> shape) {
  return {std::move(fqn), Role::param, dtype, std::move(shape)};
}

std::vector<TensorSpec> odd_tensors() {
  return {spec("w", DType::bf16, {3, 5}),    spec("empty.z", DType::f32, {0, 7}),
          spec("a", DType::f32, {2}),        spec("empty.a", DType::bf16, {4, 0}),
          spec("scalar", DType::i64, {}),    spec("half", DType::f4, {6}),
          spec("mask", DType::boolean, {3}), spec("\u00e9\"\\", DType::u8, {1})};
}

// Writes the files of `manifest` to /m, with their headers and with zeros as data, and the index.
void put(FileSystem& files, const Manifest& manifest) {
  for (uint32_t f = 0; f < manifest.files.size(); ++f) {
    const auto file = files.create("/m/" + manifest.files[f].name);
    const std::string header = output_header(manifest, f);
    EXPECT_EQ(header.size(), manifest.files[f].header_bytes);
    file->write(std::as_bytes(std::span(header)), 0);
    file->truncate(manifest.files[f].identity.size_bytes);
  }
  if (manifest.files.size() == 1) return;
  const std::string index = output_index(manifest);
  files.create(std::string("/m/") + kIndexFile)->write(std::as_bytes(std::span(index)), 0);
}

// Catches: an extent, a size or an order that differs from the header on disk.
TEST(OutputManifest, IsTheManifestOfTheWrittenCheckpoint) {
  for (const FileSpecs& specs :
       {split_into_files(odd_tensors(), 1'000'000), split_into_files(odd_tensors(), 20),
        group_by_file(odd_tensors(), std::vector<uint32_t>{7, 2, 2, 7, 7, 9, 9, 2})}) {
    const Manifest manifest = output_manifest(specs);
    MemoryFileSystem files;
    files.make_directory("/m");
    put(files, manifest);
    const Checkpoint opened = open_checkpoint(files, "/m");
    EXPECT_EQ(opened.warnings, std::vector<std::string>{});
    EXPECT_EQ(opened.manifest.tensors, manifest.tensors);
    EXPECT_EQ(opened.manifest.identity, manifest.identity);
    EXPECT_EQ(opened.metadata.at("format"), "pt");
    ASSERT_EQ(opened.manifest.files.size(), manifest.files.size());
    for (size_t f = 0; f < manifest.files.size(); ++f) {
      EXPECT_EQ(opened.manifest.files[f].name, manifest.files[f].name);
      EXPECT_EQ(opened.manifest.files[f].header_bytes, manifest.files[f].header_bytes);
    }
  }
}

TEST(OutputManifest, TensorsAreGroupedByTheNumbersOfTheirFiles) {
  const FileSpecs files = group_by_file(
      {spec("c", DType::u8, {1}), spec("a", DType::u8, {1}), spec("b", DType::f32, {1})},
      std::vector<uint32_t>{5, 3, 5});
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0][0].fqn, "a");
  EXPECT_EQ(files[1][0].fqn, "b");  // the larger dtype first, so that every tensor is aligned
  EXPECT_EQ(files[1][1].fqn, "c");
}

TEST(OutputManifest, SavingNoTensorIsAUsageError) {
  try {
    output_manifest({});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
  }
}

}  // namespace
}  // namespace modicum
