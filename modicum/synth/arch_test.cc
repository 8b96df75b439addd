#include "modicum/synth/arch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "modicum/base/base.h"
#include "modicum/checkpoint/checkpoint.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

struct ArchCase {
  const char* arch;
  size_t tensors;    // number of tensors
  int64_t elements;  // of all tensors, scales included
  uint64_t bytes;    // of all tensors
};

class ArchNumbers : public testing::TestWithParam<ArchCase> {};

TEST_P(ArchNumbers, EqualTheHubs) {
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

// gpt2: 124,439,808 parameters and twelve masks of 1024 x 1024. gpt-oss: 1,804,459,584 weights in
// bf16, and per layer and expert (5760 + 2880) rows of 90 blocks of 16 bytes and a scale. tiny-fp8:
// weights, the biases of two routers of 4 experts, and 39 scales for attention, 18 for the MLP and
// 60 for experts.
INSTANTIATE_TEST_SUITE_P(
    Hub, ArchNumbers,
    testing::Values(ArchCase{"gpt2", 160, 124'439'808 + 12 * 1024 * 1024, 548'090'880},
                    ArchCase{"llama-3.2-1b", 146, 1'235'814'400, 2'471'628'800},
                    ArchCase{"llama-3.1-70b", 723, 70'553'706'496, 141'107'412'992},
                    ArchCase{"qwen2.5-0.5b", 290, 494'032'768, 988'065'536},
                    ArchCase{"qwen2.5-vl-7b", 729, 8'292'166'656, 16'584'333'312},
                    ArchCase{"qwen3-0.6b", 310, 596'049'920, 1'192'099'840},
                    ArchCase{"qwen3-8b", 399, 8'190'735'360, 16'381'470'720},
                    ArchCase{"qwen3-32b", 707, 32'762'123'264, 65'524'246'528},
                    ArchCase{"qwen3-30b-a3b", 18'867, 30'532'122'624, 61'064'245'248},
                    ArchCase{"qwen3-235b-a22b", 36'945, 235'093'634'560, 470'187'269'120},
                    ArchCase{"qwen3-next-80b-a3b", 75'944, 81'324'862'720, 162'649'725'440},
                    ArchCase{"mixtral-8x7b", 995, 46'702'792'704, 93'405'585'408},
                    ArchCase{"gpt-oss-20b", 459, 1'804'459'584 + 24L * 32 * 8640 * 90 * 17,
                             13'761'264'768},
                    ArchCase{"deepseek-v3", 91'991, 684'531'386'000, 688'574'839'360},
                    ArchCase{"tiny-moe", 45, 1154, 2308},
                    ArchCase{"tiny-fp8", 115, 588'816 + 8 + 117, 597'716}));

std::map<DType, int64_t> elements_by_dtype(const std::vector<TensorSpec>& tensors) {
  std::map<DType, int64_t> elements;
  for (const TensorSpec& spec : tensors) elements[spec.dtype] += numel_of(spec.shape);
  return elements;
}

TEST(Arch, DeepseekHasTheHubsCountOfEachDtype) {
  EXPECT_EQ(elements_by_dtype(arch_tensors(arch_named("deepseek-v3"))),
            (std::map<DType, int64_t>{{DType::bf16, 3'918'786'560},
                                      {DType::f8_e4m3, 680'571'043'840},
                                      {DType::f32, 41'555'600}}));
}

// Every matrix of FP8 codes has scales, and no other tensor has scales. Blocks at the edges are
// smaller.
TEST(Arch, EveryBlockOf128RowsAndColumnsHasAScale) {
  for (const char* name : {"deepseek-v3", "tiny-fp8"}) {
    std::map<std::string, TensorSpec> by_name;
    for (TensorSpec& spec : arch_tensors(arch_named(name), 4)) by_name[spec.fqn] = spec;
    size_t codes = 0, scales = 0;
    for (const auto& [fqn, spec] : by_name) {
      scales += fqn.find("_scale_inv") != std::string::npos ? 1 : 0;
      if (spec.dtype != DType::f8_e4m3) continue;
      ++codes;
      const TensorSpec& scale = by_name[fqn + "_scale_inv"];
      EXPECT_EQ(scale.dtype, DType::f32);
      EXPECT_EQ(scale.shape,
                (std::vector<int64_t>{(spec.shape[0] + 127) / 128, (spec.shape[1] + 127) / 128}));
    }
    EXPECT_GT(codes, 50U);
    EXPECT_EQ(codes, scales);
  }
}

std::string shape_of(const char* arch, const std::string& fqn) {
  for (const TensorSpec& spec : arch_tensors(arch_named(arch))) {
    if (spec.fqn == fqn) return shape_text(spec.shape);
  }
  return "absent";
}

TEST(Arch, NamesAndShapesEqualTheHubs) {
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
  EXPECT_EQ(shape_of("llama-3.2-1b", "model.layers.15.self_attn.k_proj.weight"), "[512, 2048]");
  EXPECT_EQ(shape_of("llama-3.2-1b", "lm_head.weight"), "absent");
  EXPECT_EQ(shape_of("llama-3.1-70b", "model.layers.79.mlp.up_proj.weight"), "[28672, 8192]");
  EXPECT_EQ(shape_of("qwen3-235b-a22b", "model.layers.93.mlp.experts.0.up_proj.weight"),
            "[1536, 4096]");
  EXPECT_EQ(shape_of("mixtral-8x7b", "model.layers.31.block_sparse_moe.experts.7.w2.weight"),
            "[4096, 14336]");
}

TEST(Arch, NamesAndShapesOfTheTowerEqualTheHubs) {
  const char* const vl = "qwen2.5-vl-7b";
  EXPECT_EQ(shape_of(vl, "visual.patch_embed.proj.weight"), "[1280, 3, 2, 14, 14]");
  EXPECT_EQ(shape_of(vl, "visual.blocks.31.attn.qkv.bias"), "[3840]");
  EXPECT_EQ(shape_of(vl, "visual.blocks.0.mlp.down_proj.weight"), "[1280, 3420]");
  EXPECT_EQ(shape_of(vl, "visual.merger.mlp.0.weight"), "[5120, 5120]");
  EXPECT_EQ(shape_of(vl, "visual.merger.mlp.2.weight"), "[3584, 5120]");
  EXPECT_EQ(shape_of(vl, "model.layers.27.self_attn.v_proj.bias"), "[512]");
  EXPECT_EQ(shape_of(vl, "lm_head.weight"), "[152064, 3584]");
}

TEST(Arch, NamesAndShapesOfLinearAttentionEqualTheHubs) {
  const char* const next = "qwen3-next-80b-a3b";
  EXPECT_EQ(shape_of(next, "model.layers.0.linear_attn.in_proj_qkvz.weight"), "[12288, 2048]");
  EXPECT_EQ(shape_of(next, "model.layers.0.linear_attn.in_proj_ba.weight"), "[64, 2048]");
  EXPECT_EQ(shape_of(next, "model.layers.46.linear_attn.conv1d.weight"), "[8192, 1, 4]");
  EXPECT_EQ(shape_of(next, "model.layers.46.linear_attn.A_log"), "[32]");
  EXPECT_EQ(shape_of(next, "model.layers.46.linear_attn.norm.weight"), "[128]");
  EXPECT_EQ(shape_of(next, "model.layers.46.self_attn.q_proj.weight"), "absent");
  EXPECT_EQ(shape_of(next, "model.layers.47.self_attn.q_proj.weight"), "[8192, 2048]");
  EXPECT_EQ(shape_of(next, "model.layers.47.self_attn.o_proj.weight"), "[2048, 4096]");
  EXPECT_EQ(shape_of(next, "model.layers.47.mlp.shared_expert_gate.weight"), "[1, 2048]");
  EXPECT_EQ(shape_of(next, "mtp.fc.weight"), "[2048, 4096]");
}

TEST(Arch, NamesAndShapesOfCodesEqualTheHubs) {
  const char* const oss = "gpt-oss-20b";
  const std::string experts = "model.layers.23.mlp.experts.";
  EXPECT_EQ(shape_of(oss, experts + "gate_up_proj_blocks"), "[32, 5760, 90, 16]");
  EXPECT_EQ(shape_of(oss, experts + "gate_up_proj_scales"), "[32, 5760, 90]");
  EXPECT_EQ(shape_of(oss, experts + "gate_up_proj_bias"), "[32, 5760]");
  EXPECT_EQ(shape_of(oss, experts + "down_proj_blocks"), "[32, 2880, 90, 16]");
  EXPECT_EQ(shape_of(oss, "model.layers.0.self_attn.sinks"), "[64]");
  EXPECT_EQ(shape_of(oss, "model.layers.0.self_attn.o_proj.bias"), "[2880]");
  const char* const deepseek = "deepseek-v3";
  const std::string kv_a = "model.layers.61.self_attn.kv_a_proj_with_mqa.weight";
  EXPECT_EQ(shape_of(deepseek, kv_a), "[576, 7168]");
  EXPECT_EQ(shape_of(deepseek, kv_a + "_scale_inv"), "[5, 56]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.0.self_attn.q_b_proj.weight"), "[24576, 1536]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.0.self_attn.kv_b_proj.weight"), "[32768, 512]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.2.mlp.up_proj.weight"), "[18432, 7168]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.3.mlp.gate.e_score_correction_bias"), "[256]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.61.eh_proj.weight"), "[7168, 14336]");
  EXPECT_EQ(shape_of(deepseek, "model.layers.61.shared_head.head.weight"), "[129280, 7168]");
}

TEST(Arch, WithADtypeThereAreNoCodes) {
  const auto deepseek = arch_tensors(arch_named("deepseek-v3"), 0, DType::bf16);
  EXPECT_EQ(elements_by_dtype(deepseek),
            (std::map<DType, int64_t>{{DType::bf16, 3'918'786'560 + 680'571'043'840},
                                      {DType::f32, 59 * 256}}));
  const auto oss = arch_tensors(arch_named("gpt-oss-20b"), 0, DType::f16);
  EXPECT_EQ(elements_by_dtype(oss), (std::map<DType, int64_t>{{DType::f16, 20'914'757'184}}));
  for (const TensorSpec& spec : oss) {
    if (spec.fqn == "model.layers.0.mlp.experts.gate_up_proj") {
      EXPECT_EQ(shape_text(spec.shape), "[32, 2880, 5760]");
    }
  }
}

TEST(Arch, TensorsAreInTheOrderOfTheStateDict) {
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

TEST(Arch, TheNumberOfLayersCanBeChosen) {
  // Embedding and final norm (the head is tied), and eleven tensors per layer.
  const auto two = arch_tensors(arch_named("qwen3-0.6b"), 2);
  EXPECT_EQ(two.size(), 2U + 2 * 11);
  EXPECT_EQ(two.back().fqn, "model.norm.weight");
  EXPECT_EQ(arch_tensors(arch_named("tiny-moe"), 3).size(), 45U + 21);
}

bool has_name_with(const std::vector<TensorSpec>& tensors, const char* part) {
  return std::any_of(tensors.begin(), tensors.end(), [part](const TensorSpec& spec) {
    return spec.fqn.find(part) != std::string::npos;
  });
}

// The MTP layer is included only at the model's own number of layers.
TEST(Arch, WithFewerLayersThereIsNoMtpLayer) {
  const Arch& deepseek = arch_named("deepseek-v3");
  const Arch& next = arch_named("qwen3-next-80b-a3b");
  for (const int layers : {0, 61}) {
    EXPECT_TRUE(has_name_with(arch_tensors(deepseek, layers), "layers.61.eh_proj"));
    EXPECT_NE(arch_config(deepseek, layers).find("\"num_nextn_predict_layers\": 1"),
              std::string::npos);
  }
  for (const int layers : {1, 60, 62}) {
    EXPECT_FALSE(has_name_with(arch_tensors(deepseek, layers), "eh_proj"));
    EXPECT_NE(arch_config(deepseek, layers).find("\"num_nextn_predict_layers\": 0"),
              std::string::npos);
  }
  EXPECT_TRUE(has_name_with(arch_tensors(next, 48), "mtp."));
  EXPECT_FALSE(has_name_with(arch_tensors(next, 47), "mtp."));
  EXPECT_TRUE(has_name_with(arch_tensors(arch_named("qwen2.5-vl-7b"), 1), "visual.blocks.31."));
}

Category category_of(FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    return error.category();
  }
  return Category::count;
}

TEST(Arch, AnUnknownNameSuggestsTheNearest) {
  try {
    arch_named("qwen3-0.6");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::usage);
    EXPECT_NE(std::string(error.what()).find("nearest is 'qwen3-0.6b'"), std::string::npos);
  }
  EXPECT_EQ(category_of([] { arch_named(""); }), Category::usage);
  EXPECT_EQ(category_of([] { arch_tensors(arch_named("gpt2"), -1); }), Category::usage);
  EXPECT_EQ(category_of([] { arch_tensors(arch_named("gpt2"), 1001); }), Category::usage);
}

TEST(ArchConfig, HasTheRequestedNumberOfLayers) {
  for (const std::string& name : arch_names()) {
    const std::string text = arch_config(arch_named(name), 7, DType::f16);
    const char* const key = name == "gpt2" ? "\"n_layer\": 7," : "\"num_hidden_layers\": 7,";
    EXPECT_NE(text.find(key), std::string::npos) << text;
  }
}

TEST(ArchConfig, FillsAllPlaceholders) {
  for (const std::string& name : arch_names()) {
    for (const auto dtype : {std::optional<DType>(), std::optional(DType::f16)}) {
      const std::string text = arch_config(arch_named(name), 3, dtype);
      EXPECT_EQ(text.find('@'), std::string::npos) << text;
      read_json(text, [](JsonValue& root) { root.skip(); });
    }
  }
}

TEST(ArchConfig, HasQuantizationConfigUnlessADtypeIsGiven) {
  const auto block_size = [](const std::string& text) {
    const size_t at = text.find("\"weight_block_size\"");
    return at == std::string::npos ? "" : text.substr(at, text.find(']', at) + 1 - at);
  };
  for (const char* name : {"deepseek-v3", "tiny-fp8"}) {
    const Arch& arch = arch_named(name);
    const std::string coded = arch_config(arch);
    EXPECT_EQ(block_size(coded), "\"weight_block_size\": [\n      128,\n      128\n    ]");
    EXPECT_NE(coded.find("\"quant_method\": \"fp8\""), std::string::npos);
    EXPECT_NE(coded.find("\"torch_dtype\": \"bfloat16\""), std::string::npos);
    EXPECT_EQ(arch_config(arch, 0, DType::bf16).find("quant"), std::string::npos);
  }
  const Arch& oss = arch_named("gpt-oss-20b");
  EXPECT_NE(arch_config(oss).find("\"quant_method\": \"mxfp4\""), std::string::npos);
  EXPECT_EQ(arch_config(oss, 0, DType::bf16).find("quant"), std::string::npos);
}

TEST(ArchConfig, NamesTheTypeOfEachLayer) {
  const std::string text = arch_config(arch_named("gpt-oss-20b"), 3);
  EXPECT_NE(text.find("\"layer_types\": [\n    \"sliding_attention\",\n    \"full_attention\",\n"
                      "    \"sliding_attention\"\n  ]"),
            std::string::npos)
      << text;
}

TEST(ArchConfig, HasTheDtypeAndTheTie) {
  const std::string text = arch_config(arch_named("qwen3-0.6b"), 0, DType::f32);
  EXPECT_EQ(text.front(), '{');
  EXPECT_NE(text.find("\"torch_dtype\": \"float32\""), std::string::npos);
  EXPECT_NE(text.find("\"num_hidden_layers\": 28"), std::string::npos);
  EXPECT_NE(text.find("\"tie_word_embeddings\": true"), std::string::npos);
}

// ---- config_tensors

// The config of a tiny-moe, with `by` in place of its line for `key`; without it if `by` is empty.
std::string config_with(const std::string& key, const std::string& by,
                        const char* arch = "tiny-moe") {
  std::string text = arch_config(arch_named(arch));
  const size_t at = text.find("  \"" + key + "\":");
  if (at == std::string::npos) return text.insert(text.find('{') + 1, by + ",");
  return text.replace(at, text.find('\n', at) - at, by.empty() ? "" : by + ",");
}

std::string refusal_of_config(const std::string& text) {
  try {
    config_tensors(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string shape_in(const std::string& config, const std::string& fqn) {
  for (const TensorSpec& spec : config_tensors(config)) {
    if (spec.fqn == fqn) return std::string(torch_name(spec.dtype)) + shape_text(spec.shape);
  }
  return "absent";
}

TEST(ConfigTensors, TheSizesAreThoseOfTheConfig) {
  const std::string gate = "model.layers.0.mlp.gate.weight";
  EXPECT_EQ(shape_in(config_with("num_experts", R"("num_experts": 9)"), gate), "bfloat16[9, 6]");
  EXPECT_EQ(shape_in(config_with("hidden_size", R"("hidden_size": 8)"), gate), "bfloat16[4, 8]");
  EXPECT_EQ(shape_in(config_with("torch_dtype", R"("dtype": "float32")"), gate), "float32[4, 6]");
  EXPECT_EQ(shape_in(config_with("head_dim", R"("head_dim": null)"),
                     "model.layers.0.self_attn.q_norm.weight"),
            "bfloat16[2]");
  const std::string bias = "model.layers.1.self_attn.o_proj.bias";
  EXPECT_EQ(shape_in(config_with("attention_bias", R"("attention_bias": true)"), bias),
            "bfloat16[6]");
  EXPECT_EQ(shape_in(config_with("attention_bias", ""), bias), "absent");
  EXPECT_EQ(shape_in(config_with("n_inner", R"("n_inner": 5)", "gpt2"), "h.0.mlp.c_fc.weight"),
            "float32[768, 5]");
}

TEST(ConfigTensors, AModelOfAnotherFamilyIsRefusedWithTheFamilies) {
  const std::string error = refusal_of_config(R"({"model_type": "gemma3", "hidden_size": 8})");
  for (const char* part : {"UNSUPPORTED: ", "got gemma3", "gpt2, llama, qwen2, qwen2_5_vl, qwen3,",
                           "mixtral, gpt_oss, deepseek_v3"}) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
  EXPECT_NE(refusal_of_config("{}").find("got no model_type"), std::string::npos);
}

// Catches: a plan for other tensors than those of the model.
TEST(ConfigTensors, WhatChangesTheTensorsOtherwiseIsRefused) {
  const auto expect = [](const std::string& config, const char* begin, const char* part) {
    const std::string error = refusal_of_config(config);
    EXPECT_TRUE(error.starts_with(begin)) << error;
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  expect(config_with("mlp_only_layers", R"("mlp_only_layers": [0])"),
         "UNSUPPORTED: ", "this mlp_only_layers");
  expect(config_with("mlp_bias", R"("mlp_bias": true)"), "UNSUPPORTED: ", "this mlp_bias");
  expect(config_with("x", R"("quantization_config": {"quant_method": "fp8"})"),
         "UNSUPPORTED: ", "expected no quantization_config, got fp8");
  expect(config_with("tie_word_embeddings", R"("tie_word_embeddings": false)", "gpt2"),
         "UNSUPPORTED: ", "this tie_word_embeddings");
  expect(config_with("attention_bias", R"("attention_bias": true)", "deepseek-v3"),
         "UNSUPPORTED: ", "this attention_bias");
  std::string other = arch_config(arch_named("tiny-moe"));
  other.replace(other.find("ForCausalLM"), 11, "ForSequenceClassification");
  expect(other, "UNSUPPORTED: ", "expected Qwen3MoeForCausalLM");
}

// Catches: sizes that overflow, or that fill the memory with names of tensors.
TEST(ConfigTensors, SizesThatAreMissingOrTooLargeAreRefused) {
  for (const char* by :
       {"", R"("num_experts": 0)", R"("num_experts": -1)", R"("num_experts": 1e30)",
        R"("num_experts": 1.5)", R"("num_experts": 1000001)", R"("num_experts": "4")"}) {
    const std::string error = refusal_of_config(config_with("num_experts", by));
    EXPECT_TRUE(error.starts_with("FORMAT.SCHEMA: num_experts is missing or has a wrong value"))
        << error;
  }
  for (const char* key : {"hidden_size", "num_key_value_heads"}) {
    EXPECT_TRUE(refusal_of_config(config_with(key, "")).starts_with("FORMAT.SCHEMA: a size is "))
        << key;
  }
  for (const char* key : {"num_hidden_layers", "num_attention_heads", "torch_dtype"}) {
    EXPECT_TRUE(refusal_of_config(config_with(key, "")).starts_with("FORMAT.SCHEMA: ")) << key;
  }
  std::string many = config_with("num_experts", R"("num_experts": 1000000)");
  EXPECT_TRUE(refusal_of_config(many).starts_with("FORMAT.SCHEMA: a size is missing or too large"));
  EXPECT_TRUE(refusal_of_config("{").starts_with("FORMAT.JSON"));
}

TEST(SplitIntoFiles, DividesTensorsAsTransformersDoes) {
  const auto bytes = [](const char* name, int64_t n) {
    return TensorSpec{name, Role::param, DType::u8, {n}};
  };
  const auto files = split_into_files(
      {bytes("d", 4), bytes("c", 6), bytes("big", 11), bytes("b", 1), bytes("a", 0)}, 10);
  ASSERT_EQ(files.size(), 3U);
  EXPECT_EQ(files[0][0].fqn, "big");  // its file comes before the one that is being filled
  EXPECT_EQ(files[1][0].fqn, "c");    // tensors of a file are sorted by name
  EXPECT_EQ(files[1][1].fqn, "d");
  EXPECT_EQ(files[2][0].fqn, "a");
  EXPECT_EQ(files[2][1].fqn, "b");
}

TEST(SplitIntoFiles, PutsLargerDtypesFirst) {
  const auto files = split_into_files(
      {{"a", Role::param, DType::u8, {2}}, {"b", Role::param, DType::f32, {2}}}, 100);
  EXPECT_EQ(files[0][0].fqn, "b");
}

struct FilesOnTheHub {
  const char* arch;
  uint64_t limit_bytes;
  size_t files;
};

// DeepSeek's tool divides tensors by another rule; here a limit of 4.25 GB gives the hub's
// number of files.
TEST(SplitIntoFiles, MakesAsManyFilesAsTheHubHas) {
  constexpr uint64_t kGb = 1'000'000'000;
  for (const FilesOnTheHub& hub :
       {FilesOnTheHub{"qwen3-8b", 4 * kGb, 5}, FilesOnTheHub{"qwen3-32b", 4 * kGb, 17},
        FilesOnTheHub{"qwen3-30b-a3b", 4 * kGb, 16}, FilesOnTheHub{"qwen3-235b-a22b", 4 * kGb, 118},
        FilesOnTheHub{"qwen3-next-80b-a3b", 4 * kGb, 41},
        FilesOnTheHub{"qwen2.5-vl-7b", 4 * kGb, 5}, FilesOnTheHub{"llama-3.2-1b", 5 * kGb, 1},
        FilesOnTheHub{"llama-3.1-70b", 5 * kGb, 30}, FilesOnTheHub{"mixtral-8x7b", 5 * kGb, 19},
        FilesOnTheHub{"gpt-oss-20b", 5 * kGb, 3},
        FilesOnTheHub{"deepseek-v3", 4'250'000'000, 163}}) {
    const auto files = split_into_files(arch_tensors(arch_named(hub.arch)), hub.limit_bytes);
    EXPECT_EQ(files.size(), hub.files) << hub.arch;
  }
  EXPECT_EQ(split_into_files(arch_tensors(arch_named("qwen3-30b-a3b")), 5 * kGb).size(), 13U);
  EXPECT_EQ(shard_name(0, 16), "model-00001-of-00016.safetensors");
  EXPECT_EQ(shard_name(0, 1), "model.safetensors");
}

}  // namespace
}  // namespace modicum
