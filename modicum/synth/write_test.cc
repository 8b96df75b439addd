#include "modicum/synth/write.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/io/file_doubles.h"
#include "modicum/io/temp_dir_double.h"
#include "modicum/synth/arch.h"
#include "modicum/synth/mark.h"

namespace modicum {
namespace {

SynthOptions options_for(const char* arch) {
  SynthOptions options;
  options.arch = arch;
  return options;
}

Error error_of(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(Category::count, "nothing was thrown");
}

// Reads every tensor back in pieces and compares it with synth_expected.
void expect_values(FileSystem& files, const std::string& path) {
  const Checkpoint checkpoint = open_checkpoint(files, path);
  const auto mark = synth_mark(checkpoint.metadata);
  ASSERT_TRUE(mark);
  for (const StoredTensor& stored : checkpoint.manifest.tensors) {
    const auto file = open_data_file(checkpoint, stored.at.file);
    const int64_t numel = numel_of(stored.spec.shape);
    for (int64_t first = 0; first < numel; first += 100'003) {
      const int64_t n = std::min<int64_t>(100'003, numel - first);
      std::vector<std::byte> got(bytes_of(stored.spec.dtype, n));
      std::vector<std::byte> expected(got.size());
      file->read(got, stored.at.begin + bytes_of(stored.spec.dtype, first));
      synth_expected(*mark, stored.spec, first, n, expected.data());
      ASSERT_EQ(got, expected) << stored.spec.fqn;
    }
  }
}

TEST(WriteSynth, OneFileHoldsTheWholeModel) {
  MemoryFileSystem files;
  const SynthResult result = write_synth(files, "out", options_for("tiny-moe"));
  EXPECT_EQ(files.list("out"), (std::vector<std::string>{"config.json", "model.safetensors"}));
  EXPECT_EQ(result.files, 1U);
  EXPECT_EQ(result.data_bytes, 2308U);
  EXPECT_EQ(result.written_bytes, 2308U);
  const Checkpoint checkpoint = open_checkpoint(files, "out");
  EXPECT_EQ(checkpoint.metadata.at("format"), "pt");
  EXPECT_EQ(checkpoint.metadata.at("modicum.synth"), "1");
  EXPECT_EQ(checkpoint.config.model_type, "qwen3_moe");
  EXPECT_TRUE(checkpoint.warnings.empty());
  auto expected = arch_tensors(arch_named("tiny-moe"));
  std::sort(expected.begin(), expected.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.fqn < b.fqn; });
  std::vector<TensorSpec> got;
  for (const StoredTensor& stored : checkpoint.manifest.tensors) got.push_back(stored.spec);
  EXPECT_EQ(got, expected);
  expect_values(files, "out");
}

TEST(WriteSynth, ShardsHaveAnIndex) {
  MemoryFileSystem files;
  SynthOptions options = options_for("tiny-moe");
  options.shard_size_bytes = 700;
  options.dtype = DType::f32;
  options.layers = 3;
  const SynthResult result = write_synth(files, "out", options);
  EXPECT_GT(result.files, 4U);
  const Checkpoint checkpoint = open_checkpoint(files, "out");
  EXPECT_EQ(checkpoint.manifest.files.size(), result.files);
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 45U + 21);
  EXPECT_EQ(checkpoint.manifest.data_bytes(), result.data_bytes);
  EXPECT_TRUE(checkpoint.warnings.empty());  // a wrong total_size in the index would be a warning
  EXPECT_NE(files.get("out/config.json").find("\"float32\""), std::string::npos);
  expect_values(files, "out");
}

TEST(WriteSynth, CodesHaveScales) {
  MemoryFileSystem files;
  write_synth(files, "out", options_for("tiny-fp8"));
  const Checkpoint checkpoint = open_checkpoint(files, "out");
  EXPECT_EQ(checkpoint.config.model_type, "deepseek_v3");
  EXPECT_TRUE(checkpoint.warnings.empty());
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 115U);
  EXPECT_NE(files.get("out/config.json").find("\"quant_method\": \"fp8\""), std::string::npos);
  expect_values(files, "out");
}

TEST(WriteSynth, WithADtypeCodesAreDequantised) {
  MemoryFileSystem files;
  SynthOptions options = options_for("tiny-fp8");
  options.dtype = DType::f16;
  write_synth(files, "out", options);
  const Checkpoint checkpoint = open_checkpoint(files, "out");
  size_t biases = 0;
  for (const StoredTensor& stored : checkpoint.manifest.tensors) {
    const bool is_bias = stored.spec.fqn.find("e_score_correction_bias") != std::string::npos;
    biases += is_bias ? 1 : 0;
    EXPECT_EQ(stored.spec.dtype, is_bias ? DType::f32 : DType::f16) << stored.spec.fqn;
  }
  EXPECT_EQ(biases, 2U);
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 115U - 48) << "without the 48 tensors of scales";
  EXPECT_EQ(files.get("out/config.json").find("quantization_config"), std::string::npos);
  expect_values(files, "out");
}

TEST(WriteSynth, TiedModelsHaveNoHead) {
  TempDir directory;
  PosixFileSystem files;
  SynthOptions options = options_for("qwen3-0.6b");
  options.layers = 1;
  options.is_sparse = true;
  write_synth(files, directory.path() + "/out", options);
  const Checkpoint checkpoint = open_checkpoint(files, directory.path() + "/out");
  EXPECT_TRUE(checkpoint.config.tie_word_embeddings);
  EXPECT_EQ(checkpoint.manifest.tensors.size(), 13U);
}

TEST(WriteSynth, ManyThreadsWriteTheSameBytes) {
  TempDir directory;
  PosixFileSystem files;
  SynthOptions options = options_for("gpt2");
  options.layers = 1;
  options.dtype = DType::bf16;
  std::vector<SynthResult> results;
  for (const int threads : {1, 3}) {
    options.threads = threads;
    const std::string out = directory.path() + "/" + std::to_string(threads);
    results.push_back(write_synth(files, out, options));
    expect_values(files, out);
  }
  EXPECT_EQ(results[0].written_bytes, results[1].written_bytes);
}

TEST(WriteSynth, SparseFilesHaveHolesThatChecksExpect) {
  TempDir directory;
  PosixFileSystem files;
  SynthOptions options = options_for("gpt2");
  options.layers = 1;
  options.is_sparse = true;
  options.edges = {2, 3};
  options.shard_size_bytes = 150'000'000;  // less than the embedding, which gets its own file
  options.threads = 2;
  const SynthResult result = write_synth(files, directory.path() + "/out", options);
  // Two embeddings; a layer of 7,087,872 parameters with a mask of 1024 x 1024; the final norm.
  EXPECT_EQ(result.data_bytes, 4 * ((50257 + 1024) * 768 + 7'087'872U + 1024 * 1024 + 2 * 768));
  EXPECT_LT(result.written_bytes, 300'000U);
  EXPECT_EQ(result.files, 2U);
  const Checkpoint checkpoint = open_checkpoint(files, directory.path() + "/out");
  EXPECT_EQ(checkpoint.metadata.at("modicum.synth.edges"), "2,3");
  expect_values(files, directory.path() + "/out");
}

TEST(WriteSynth, RefusesAnExistingDirectory) {
  MemoryFileSystem files;
  write_synth(files, "out", options_for("tiny-moe"));
  const std::string before = files.get("out/model.safetensors");
  const Error error = error_of([&] { write_synth(files, "out", options_for("tiny-moe")); });
  EXPECT_EQ(error.category(), Category::conflict);
  EXPECT_EQ(files.get("out/model.safetensors"), before);
  files.put("file", "x");
  EXPECT_EQ(error_of([&] { write_synth(files, "file", options_for("tiny-moe")); }).category(),
            Category::conflict);
}

TEST(WriteSynth, RefusesInvalidOptionsBeforeItCreatesFiles) {
  MemoryFileSystem files;
  const auto refused = [&](FunctionRef<void(SynthOptions&)> spoil) {
    SynthOptions options = options_for("tiny-moe");
    spoil(options);
    const Error error = error_of([&] { write_synth(files, "out", options); });
    EXPECT_EQ(error.category(), Category::usage) << error.what();
    EXPECT_FALSE(files.exists("out"));
  };
  refused([](SynthOptions& o) { o.arch = "tiny-mo"; });
  refused([](SynthOptions& o) { o.layers = -1; });
  refused([](SynthOptions& o) { o.shard_size_bytes = 0; });
  refused([](SynthOptions& o) { o.threads = 0; });
  refused([](SynthOptions& o) { o.dtype = DType::i32; });
  refused([](SynthOptions& o) { o.edges = {2}; });
  refused([](SynthOptions& o) {
    o.is_sparse = true;
    o.edges = {0};
  });
}

TEST(WriteSynth, RemovesItsFilesWhenAnyCallFails) {
  SynthOptions options = options_for("tiny-moe");
  options.shard_size_bytes = 700;
  MemoryFileSystem unfailing;
  RecordingFileSystem recording(unfailing);
  write_synth(recording, "out", options);
  const auto calls = static_cast<int64_t>(recording.calls().size());
  ASSERT_GT(calls, 50);
  for (int64_t n = 1; n <= calls; ++n) {
    MemoryFileSystem under;
    RecordingFileSystem failing(under, n);
    const Error error = error_of([&] { write_synth(failing, "out", options); });
    ASSERT_EQ(error.category(), Category::io) << "call " << n;
    ASSERT_FALSE(under.exists("out")) << "call " << n;
  }
}

}  // namespace
}  // namespace modicum
