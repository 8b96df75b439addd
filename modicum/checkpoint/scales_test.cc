#include <gtest/gtest.h>

#include <chrono>

#include <algorithm>
#include <array>

#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/test_files_doubles.h"

namespace modicum {
namespace {

TensorSpec spec(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {std::move(name), Role::param, dtype, std::move(shape)};
}

Manifest opened(const std::vector<TensorSpec>& specs, const char* config = nullptr) {
  MemoryFileSystem files;
  files.make_directory("/m");
  SafetensorsWriter out(files, "/m/model.safetensors", specs);
  out.finish();
  if (config != nullptr) files.put("/m/config.json", config);
  return open_checkpoint(files, "/m").manifest;
}

const StoredTensor& named(const Manifest& manifest, std::string_view name) {
  return *std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                       [name](const StoredTensor& s) { return s.spec.fqn == name; });
}

// The name of a tensor's scale; "" without one.
std::string scale_of(const Manifest& manifest, std::string_view name) {
  const auto& scale = named(manifest, name).scale;
  return scale ? manifest.tensors[scale->tensor].spec.fqn : "";
}

TEST(PairedScales, AreFoundByName) {
  const Manifest manifest = opened({
      spec("a.weight", DType::f8_e4m3, {256, 256}),
      spec("a.weight_scale_inv", DType::f32, {2, 2}),
      spec("experts.gate_up_proj", DType::f8_e5m2, {3, 256, 128}),
      spec("experts.gate_up_proj_scale_inv", DType::bf16, {3, 2, 1}),
      spec("c.weight", DType::f8_e4m3, {8, 8}),
      spec("c.weight_scale", DType::f16, {8, 1}),
      spec("both.weight", DType::f8_e4m3, {8, 8}),
      spec("both.weight_scale", DType::f32, {8, 1}),
      spec("both.weight_scale_inv", DType::f32, {1}),
      spec("bytes", DType::f8_e4m3, {8, 8}),
      spec("bytes_scale", DType::u8, {8, 1}),
      spec("powers", DType::f8_e4m3, {8, 8}),
      spec("powers_scale_inv", DType::f8_e8m0, {1, 8}),
      spec("alone.weight", DType::f8_e4m3, {8, 8}),
      spec("wrong.weight", DType::f8_e4m3, {8, 8}),
      spec("wrong.weight_scale_inv", DType::i32, {8, 1}),
      spec("plain.weight", DType::bf16, {8, 8}),
      spec("plain.weight_scale_inv", DType::f32, {8, 1}),
      spec("fnuz.weight", DType::f8_e4m3fnuz, {8, 8}),
      spec("fnuz.weight_scale", DType::f32, {8, 1}),
  });
  EXPECT_EQ(scale_of(manifest, "a.weight"), "a.weight_scale_inv");
  EXPECT_EQ(named(manifest, "a.weight").scale->block, (MatrixSize{128, 128}));
  EXPECT_EQ(scale_of(manifest, "experts.gate_up_proj"), "experts.gate_up_proj_scale_inv");
  EXPECT_EQ(named(manifest, "experts.gate_up_proj").scale->block, (MatrixSize{128, 128}));
  EXPECT_EQ(scale_of(manifest, "c.weight"), "c.weight_scale");
  EXPECT_EQ(named(manifest, "c.weight").scale->block, (MatrixSize{1, 8}));
  EXPECT_EQ(scale_of(manifest, "both.weight"), "both.weight_scale_inv");
  EXPECT_EQ(named(manifest, "both.weight").scale->block, (MatrixSize{8, 8}));
  EXPECT_EQ(scale_of(manifest, "bytes"), "bytes_scale");
  EXPECT_EQ(scale_of(manifest, "powers"), "powers_scale_inv");
  for (const char* none : {"alone.weight", "wrong.weight", "plain.weight", "fnuz.weight",
                           "a.weight_scale_inv", "both.weight_scale"}) {
    EXPECT_EQ(scale_of(manifest, none), "") << none;
  }
}

TEST(PairedScales, HaveTheConfigsBlockSizeIfItFitsTheGrid) {
  const std::vector<TensorSpec> specs = {spec("w", DType::f8_e4m3, {200, 300}),
                                         spec("w_scale_inv", DType::f32, {2, 3})};
  const auto block = [&](const char* config) {
    return named(opened(specs, config), "w").scale->block;
  };
  const char* kFits = R"({"quantization_config":{"weight_block_size":[128,128]}})";
  EXPECT_EQ(block(kFits), (MatrixSize{128, 128}));
  EXPECT_EQ(block(R"({"text_config":{"quantization_config":{"weight_block_size":[199,100]}}})"),
            (MatrixSize{199, 100}));
  // If the config has no size that fits: blocks of 100 x 100 divide the tensor evenly, but blocks
  // of 128 x 128 give the same grid, so neither is chosen.
  for (const char* other : {"{}", R"({"quantization_config":{"weight_block_size":[64,64]}})",
                            R"({"quantization_config":{"weight_block_size":null}})"}) {
    EXPECT_EQ(block(other), (MatrixSize{0, 0})) << other;
  }
}

// Two different values of weight_block_size, and values that are not two positive integers.
constexpr std::array<const char*, 12> kNoBlockSizes = {
    R"({"quantization_config":{"weight_block_size":[128]}})",
    R"({"quantization_config":{"weight_block_size":[128,128,128]}})",
    R"({"quantization_config":{"weight_block_size":[-128,128]}})",
    R"({"quantization_config":{"weight_block_size":[0,128]}})",
    R"({"quantization_config":{"weight_block_size":[1e2,128]}})",
    R"({"quantization_config":{"weight_block_size":[9223372036854775808,128]}})",
    R"({"quantization_config":{"weight_block_size":["128","128"]}})",
    R"({"quantization_config":{"weight_block_size":"128"}})",
    R"({"quantization_config":{"weight_block_size":128}})",
    R"({"quantization_config":[128,128]})",
    R"({"text_config":7})",
    R"({"quantization_config":{"weight_block_size":[128,128]},
        "text_config":{"quantization_config":{"weight_block_size":[64,64]}}})"};

TEST(PairedScales, ARefusedBlockSizeIsNamedByItsPath) {
  const auto what = [](const char* config) {
    std::vector<std::string> warnings;
    return parse_config(config, warnings).block_size_fault->what_happened();
  };
  EXPECT_EQ(what(kNoBlockSizes[0]), "quantization_config.weight_block_size has a wrong value");
  EXPECT_EQ(what(R"({"text_config":{"quantization_config":{"weight_block_size":7}}})"),
            "text_config.quantization_config.weight_block_size has a wrong value");
  EXPECT_EQ(what(kNoBlockSizes[11]),
            "quantization_config.weight_block_size and "
            "text_config.quantization_config.weight_block_size differ");
}

TEST(PairedScales, ARefusedBlockSizeIsQuoted) {
  const auto facts = [](const char* config) {
    std::vector<std::string> warnings;
    return parse_config(config, warnings).block_size_fault->facts();
  };
  EXPECT_EQ(facts(kNoBlockSizes[0]).got, "[128]");
  EXPECT_EQ(facts(kNoBlockSizes[2]).got, "[-128, 128]");
  EXPECT_EQ(facts(kNoBlockSizes[4]).got, "[1e2, 128]");
  EXPECT_EQ(facts(kNoBlockSizes[6]).got, "[a string, a string]");
  EXPECT_EQ(facts(kNoBlockSizes[7]).got, "a string");
  EXPECT_EQ(facts(kNoBlockSizes[11]).expected, "[128, 128]");
  EXPECT_EQ(facts(kNoBlockSizes[11]).got, "[64, 64]");
  EXPECT_EQ(facts(R"({"quantization_config":{"weight_block_size":[1,2,3,4,5,6]}})").got,
            "[1, 2, 3, 4, ...]");
}

// Catches: an unreadable config, or a value of a wrong type, that is treated as missing. The two
// row blocks of `w`, which has 256 rows, would then be mistaken for blocks of 128.
TEST(PairedScales, WithABrokenConfigOnlyShapesDetermineTheBlockSize) {
  const std::vector<TensorSpec> specs = {
      spec("w", DType::f8_e4m3, {256, 384}),      spec("w_scale_inv", DType::f32, {2, 3}),
      spec("rows", DType::f8_e4m3, {256, 384}),   spec("rows_scale_inv", DType::f32, {256, 1}),
      spec("single", DType::f8_e4m3, {256, 384}), spec("single_scale_inv", DType::f32, {1}),
      spec("halves", DType::f8_e4m3, {1, 7}),     spec("halves_scale_inv", DType::f32, {1, 4})};
  std::vector<const char*> broken(kNoBlockSizes.begin(), kNoBlockSizes.end());
  for (const char* text : {"", "{", "[]", "null", "{\"a\": \xff}", "{} {}",
                           R"({"quantization_config": {}, "quantization_config": {}})"}) {
    broken.push_back(text);
  }
  for (const char* config : broken) {
    const Manifest manifest = opened(specs, config);
    EXPECT_FALSE(named(manifest, "w").scale->fits()) << config;
    EXPECT_EQ(named(manifest, "rows").scale->block, (MatrixSize{1, 384})) << config;
    EXPECT_EQ(named(manifest, "single").scale->block, (MatrixSize{256, 384})) << config;
    EXPECT_EQ(named(manifest, "halves").scale->block, (MatrixSize{1, 2})) << config;
  }
  for (const char* config : {"{}", R"({"quantization_config":{"weight_block_size":null}})",
                             R"({"quantization_config":null,"text_config":null})"}) {
    EXPECT_EQ(named(opened(specs, config), "w").scale->block, (MatrixSize{128, 128})) << config;
  }
}

TEST(PairedScales, InferredOrUnknownBlockSizesAreWarnings) {
  const auto warnings = [](std::vector<int64_t> grid) {
    MemoryFileSystem files;
    files.make_directory("/m");
    const std::vector<TensorSpec> specs = {spec("w", DType::f8_e4m3, {200, 256}),
                                           spec("w_scale_inv", DType::f32, std::move(grid))};
    SafetensorsWriter(files, "/m/model.safetensors", specs).finish();
    return open_checkpoint(files, "/m").warnings;
  };
  EXPECT_EQ(warnings({200, 1}), std::vector<std::string>{});
  ASSERT_EQ(warnings({1, 2}).size(), 1U);
  EXPECT_NE(warnings({1, 2})[0].find("taken from shapes"), std::string::npos);
  ASSERT_EQ(warnings({2, 1}).size(), 1U);
  EXPECT_NE(warnings({2, 1})[0].find("is unknown"), std::string::npos);
}

TEST(PairedScales, AGridThatFitsNoBlockSizeIsMarked) {
  const Manifest manifest =
      opened({spec("w", DType::f8_e4m3, {200, 300}), spec("w_scale_inv", DType::f32, {2, 7})});
  ASSERT_TRUE(named(manifest, "w").scale.has_value());
  EXPECT_FALSE(named(manifest, "w").scale->fits());
}

// Catches: ranks that load with another block size than the plan's.
TEST(PairedScales, TheBlockSizeIsPartOfTheIdentity) {
  const std::vector<TensorSpec> specs = {spec("w", DType::f8_e4m3, {200, 300}),
                                         spec("w_scale_inv", DType::f32, {2, 3})};
  const char* const kBlocksOf128 = R"({"quantization_config":{"weight_block_size":[128,128]}})";
  EXPECT_NE(opened(specs).identity, opened(specs, kBlocksOf128).identity);
  EXPECT_EQ(opened(specs).identity, opened(specs, "{}").identity);
}

// 46,000 pairs take a few ms; a search in O(n^2) compares 46,000 x 92,000 names.
TEST(PairedScales, AreFoundQuicklyInALargeModel) {
  Manifest manifest;
  for (int i = 0; i < 46'000; ++i) {
    const std::string name = "model.layers.0.mlp.experts." + std::to_string(i) + ".weight";
    manifest.tensors.push_back({spec(name, DType::f8_e4m3, {256, 128}), {}});
    manifest.tensors.push_back({spec(name + "_scale_inv", DType::f32, {2, 1}), {}});
  }
  const auto begin = std::chrono::steady_clock::now();
  ModelConfig config;
  config.weight_block_size = MatrixSize{128, 128};
  std::vector<std::string> warnings;
  pair_scales(manifest, config, warnings);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  for (size_t i = 0; i < manifest.tensors.size(); i += 2) {
    ASSERT_EQ(manifest.tensors[i].scale->tensor, i + 1);
  }
}

}  // namespace
}  // namespace modicum
