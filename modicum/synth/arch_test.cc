#include "modicum/synth/arch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/synth/shards.h"

namespace modicum {
namespace {

struct Known {
  const char* arch;
  size_t tensors;
  int64_t elements;
  uint64_t bytes;
};

class ArchNumbers : public testing::TestWithParam<Known> {};

TEST_P(ArchNumbers, AreThoseOfTheHub) {
  const auto tensors = arch_tensors(arch_named(GetParam().arch));
  int64_t elements = 0;
  uint64_t bytes = 0;
  std::set<std::string> names;
  for (const TensorSpec& spec : tensors) {
    elements += numel_of(spec.shape);
    bytes += bytes_of(spec.dtype, numel_of(spec.shape));
    names.insert(spec.fqn);
  }
  EXPECT_EQ(tensors.size(), GetParam().tensors);
  EXPECT_EQ(names.size(), tensors.size());
  EXPECT_EQ(elements, GetParam().elements);
  EXPECT_EQ(bytes, GetParam().bytes);
}

// gpt2: 124,439,808 parameters and twelve masks of 1024 x 1024.
INSTANTIATE_TEST_SUITE_P(
    Hub, ArchNumbers,
    testing::Values(Known{"gpt2", 160, 124'439'808 + 12 * 1024 * 1024, 548'090'880},
                    Known{"qwen2.5-0.5b", 290, 494'032'768, 988'065'536},
                    Known{"qwen3-0.6b", 310, 596'049'920, 1'192'099'840},
                    Known{"qwen3-30b-a3b", 18'867, 30'532'122'624, 61'064'245'248},
                    Known{"tiny-moe", 45, 1154, 2308}));

std::string shape_of(const char* arch, const std::string& fqn) {
  for (const TensorSpec& spec : arch_tensors(arch_named(arch))) {
    if (spec.fqn == fqn) return shape_text(spec.shape);
  }
  return "absent";
}

TEST(Arch, NamesAndShapesAreThoseOfTheHub) {
  EXPECT_EQ(shape_of("gpt2", "wte.weight"), "[50257, 768]");
  EXPECT_EQ(shape_of("gpt2", "h.11.attn.c_attn.weight"), "[768, 2304]");
  EXPECT_EQ(shape_of("gpt2", "h.0.attn.bias"), "[1, 1, 1024, 1024]");
  EXPECT_EQ(shape_of("gpt2", "h.0.mlp.c_fc.weight"), "[768, 3072]");
  EXPECT_EQ(shape_of("qwen2.5-0.5b", "model.layers.23.self_attn.k_proj.bias"), "[128]");
  EXPECT_EQ(shape_of("qwen2.5-0.5b", "model.layers.0.mlp.down_proj.weight"), "[896, 4864]");
  EXPECT_EQ(shape_of("qwen2.5-0.5b", "lm_head.weight"), "absent");
  EXPECT_EQ(shape_of("qwen3-0.6b", "model.layers.27.self_attn.q_norm.weight"), "[128]");
  EXPECT_EQ(shape_of("qwen3-0.6b", "model.layers.0.self_attn.o_proj.weight"), "[1024, 2048]");
  EXPECT_EQ(shape_of("qwen3-0.6b", "lm_head.weight"), "absent");
  EXPECT_EQ(shape_of("qwen3-30b-a3b", "model.layers.47.mlp.experts.127.down_proj.weight"),
            "[2048, 768]");
  EXPECT_EQ(shape_of("qwen3-30b-a3b", "model.layers.0.mlp.gate.weight"), "[128, 2048]");
  EXPECT_EQ(shape_of("qwen3-30b-a3b", "lm_head.weight"), "[151936, 2048]");
}

TEST(Arch, TensorsStandInTheOrderOfTheStateDict) {
  const auto tensors = arch_tensors(arch_named("gpt2"), 1);
  std::vector<std::string> names;
  for (const TensorSpec& spec : tensors) names.push_back(spec.fqn);
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.bias",
                "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight",
                "h.0.attn.c_proj.bias", "h.0.ln_2.weight", "h.0.ln_2.bias", "h.0.mlp.c_fc.weight",
                "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias", "ln_f.weight",
                "ln_f.bias"}));
}

TEST(Arch, FewerLayersAreAPrefix) {
  const auto two = arch_tensors(arch_named("qwen3-0.6b"), 2);
  EXPECT_EQ(two.size(), 2U + 2 * 11);
  EXPECT_EQ(two.back().fqn, "model.norm.weight");
  EXPECT_EQ(arch_tensors(arch_named("tiny-moe"), 3).size(), 45U + 21);
}

Category category_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.category();
  }
  return Category::count;
}

TEST(Arch, AnUnknownNameIsToldTheNearest) {
  try {
    arch_named("qwen3-0.6");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_NE(std::string(error.what()).find("did you mean qwen3-0.6b?"), std::string::npos);
  }
  EXPECT_EQ(category_of([] { arch_named(""); }), Category::usage);
  EXPECT_EQ(category_of([] { arch_tensors(arch_named("gpt2"), -1); }), Category::usage);
  EXPECT_EQ(category_of([] { arch_tensors(arch_named("gpt2"), 1001); }), Category::usage);
}

// The numbers of a config.json by name; whatever is no integer is left out.
std::map<std::string, int64_t> numbers_in(const std::string& text) {
  std::map<std::string, int64_t> numbers;
  read_json(text, [&](JsonValue& root) {
    root.object([&](std::string_view key, JsonValue& value) {
      if (value.kind() != JsonValue::Kind::number) return;
      const double number = value.number();
      numbers[std::string(key)] = static_cast<int64_t>(number);
    });
  });
  return numbers;
}

TEST(ArchConfig, AgreesWithTheShapes) {
  for (const std::string& name : arch_names()) {
    const Arch& arch = arch_named(name);
    const ArchWidths& w = arch.widths;
    auto numbers = numbers_in(arch_config(arch, 7, DType::f16));
    EXPECT_EQ(numbers["vocab_size"], w.vocab);
    const bool is_gpt2 = name == "gpt2";
    EXPECT_EQ(numbers[is_gpt2 ? "n_layer" : "num_hidden_layers"], 7);
    EXPECT_EQ(numbers[is_gpt2 ? "n_embd" : "hidden_size"], w.hidden);
    if (is_gpt2) {
      EXPECT_EQ(numbers["n_positions"], w.positions);
      continue;
    }
    EXPECT_EQ(numbers["num_attention_heads"], w.heads);
    EXPECT_EQ(numbers["num_key_value_heads"], w.kv_heads);
    EXPECT_EQ(numbers["num_experts"], w.experts);
    EXPECT_EQ(numbers["moe_intermediate_size"], w.expert_intermediate);
    if (w.experts == 0) {
      EXPECT_EQ(numbers["intermediate_size"], w.intermediate);
    }
    const bool says_head_dim = numbers.count("head_dim") != 0;
    EXPECT_EQ(says_head_dim ? numbers["head_dim"] : w.hidden / w.heads, w.head_dim);
  }
}

TEST(ArchConfig, SaysTheDtypeAndWhetherTheHeadIsTied) {
  const std::string text = arch_config(arch_named("qwen3-0.6b"), 0, DType::f32);
  EXPECT_EQ(text.front(), '{');
  EXPECT_NE(text.find("\"torch_dtype\": \"float32\""), std::string::npos);
  EXPECT_NE(text.find("\"num_hidden_layers\": 28"), std::string::npos);
  EXPECT_NE(text.find("\"tie_word_embeddings\": true"), std::string::npos);
}

TEST(SplitIntoFiles, AsTransformersDoesIt) {
  const auto bytes = [](const char* name, int64_t n) {
    return TensorSpec{name, Role::param, DType::u8, {n}};
  };
  const auto files = split_into_files(
      {bytes("d", 4), bytes("c", 6), bytes("big", 11), bytes("b", 1), bytes("a", 0)}, 10);
  ASSERT_EQ(files.size(), 3U);
  EXPECT_EQ(files[0][0].fqn, "big");  // goes before the file that it interrupts
  EXPECT_EQ(files[1][0].fqn, "c");    // within a file by name
  EXPECT_EQ(files[1][1].fqn, "d");
  EXPECT_EQ(files[2][0].fqn, "a");
  EXPECT_EQ(files[2][1].fqn, "b");
}

TEST(SplitIntoFiles, PutsLargerDtypesFirst) {
  const auto files = split_into_files(
      {{"a", Role::param, DType::u8, {2}}, {"b", Role::param, DType::f32, {2}}}, 100);
  EXPECT_EQ(files[0][0].fqn, "b");
}

TEST(SplitIntoFiles, Qwen3MoeIsSixteenFilesOf4GbAsOnTheHub) {
  const auto tensors = arch_tensors(arch_named("qwen3-30b-a3b"));
  EXPECT_EQ(split_into_files(tensors, 4'000'000'000).size(), 16U);
  EXPECT_EQ(split_into_files(tensors, 5'000'000'000).size(), 13U);
  EXPECT_EQ(shard_name(0, 16), "model-00001-of-00016.safetensors");
  EXPECT_EQ(shard_name(0, 1), "model.safetensors");
}

}  // namespace
}  // namespace modicum
