#include "modicum/synth/arch.h"

#include <algorithm>
#include <array>

#include "modicum/base/base.h"
#include "modicum/synth/configs.h"
#include "modicum/synth/families.h"

namespace modicum {
namespace {

constexpr ArchWidths kGpt2{
    .vocab = 50257, .hidden = 768, .intermediate = 3072, .positions = 1024, .is_tied = true};

constexpr ArchWidths kQwen25Half{.vocab = 151936,
                                 .hidden = 896,
                                 .intermediate = 4864,
                                 .heads = 14,
                                 .kv_heads = 2,
                                 .head_dim = 64,
                                 .is_tied = true,
                                 .has_qkv_bias = true};

constexpr ArchWidths kQwen3Small{.vocab = 151936,
                                 .hidden = 1024,
                                 .intermediate = 3072,
                                 .heads = 16,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .is_tied = true,
                                 .has_qk_norm = true};

constexpr ArchWidths kQwen3Dense{.vocab = 151936,
                                 .hidden = 4096,
                                 .intermediate = 12288,
                                 .heads = 32,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .has_qk_norm = true};

constexpr ArchWidths kQwen3Large{.vocab = 151936,
                                 .hidden = 5120,
                                 .intermediate = 25600,
                                 .heads = 64,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .has_qk_norm = true};

constexpr ArchWidths kLlama32Small{.vocab = 128256,
                                   .hidden = 2048,
                                   .intermediate = 8192,
                                   .heads = 32,
                                   .kv_heads = 8,
                                   .head_dim = 64,
                                   .is_tied = true};

constexpr ArchWidths kLlama31Large{.vocab = 128256,
                                   .hidden = 8192,
                                   .intermediate = 28672,
                                   .heads = 64,
                                   .kv_heads = 8,
                                   .head_dim = 128};

constexpr ArchWidths kQwen25Vl{.vocab = 152064,
                               .hidden = 3584,
                               .intermediate = 18944,
                               .heads = 28,
                               .kv_heads = 4,
                               .head_dim = 128,
                               .has_qkv_bias = true,
                               .tower = {.depth = 32,
                                         .hidden = 1280,
                                         .intermediate = 3420,
                                         .channels = 3,
                                         .frames = 2,
                                         .patch = 14,
                                         .merge = 2}};

constexpr ArchWidths kQwen3Moe{.vocab = 151936,
                               .hidden = 2048,
                               .heads = 32,
                               .kv_heads = 4,
                               .head_dim = 128,
                               .experts = 128,
                               .expert_intermediate = 768,
                               .has_qk_norm = true};

constexpr ArchWidths kQwen3LargeMoe{.vocab = 151936,
                                    .hidden = 4096,
                                    .heads = 64,
                                    .kv_heads = 4,
                                    .head_dim = 128,
                                    .experts = 128,
                                    .expert_intermediate = 1536,
                                    .has_qk_norm = true};

constexpr ArchWidths kQwen3Next{.vocab = 151936,
                                .hidden = 2048,
                                .heads = 16,
                                .kv_heads = 2,
                                .head_dim = 256,
                                .experts = 512,
                                .expert_intermediate = 512,
                                .shared_intermediate = 512,
                                .has_qk_norm = true,
                                .has_query_gate = true,
                                .has_mtp = true,
                                .linear = {.interval = 4,
                                           .key_heads = 16,
                                           .key_dim = 128,
                                           .value_heads = 32,
                                           .value_dim = 128,
                                           .kernel = 4}};

constexpr ArchWidths kMixtral{.vocab = 32000,
                              .hidden = 4096,
                              .heads = 32,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .experts = 8,
                              .expert_intermediate = 14336};

constexpr ArchWidths kGptOss{.vocab = 201088,
                             .hidden = 2880,
                             .heads = 64,
                             .kv_heads = 8,
                             .head_dim = 64,
                             .experts = 32,
                             .expert_intermediate = 2880,
                             .has_qkv_bias = true,
                             .has_o_bias = true,
                             .has_sinks = true};

constexpr ArchWidths kDeepseekV3{
    .vocab = 129280,
    .hidden = 7168,
    .intermediate = 18432,
    .heads = 128,
    .experts = 256,
    .expert_intermediate = 2048,
    .shared_intermediate = 2048,
    .dense_layers = 3,
    .has_mtp = true,
    .latent = {
        .query_rank = 1536, .kv_rank = 512, .plain_dim = 128, .rotated_dim = 64, .value_dim = 128}};

// For tests: as Qwen3's experts, in a few KB, with widths that divide evenly by little.
constexpr ArchWidths kTinyMoe{.vocab = 13,
                              .hidden = 6,
                              .heads = 3,
                              .kv_heads = 1,
                              .head_dim = 2,
                              .experts = 4,
                              .expert_intermediate = 5,
                              .has_qk_norm = true};

// For tests: as DeepSeek-V3, in half a MB, with blocks cut off at both edges. It has no layer that
// predicts more tokens: transformers knows that one by the number 61 only.
constexpr ArchWidths kTinyFp8{
    .vocab = 13,
    .hidden = 192,
    .intermediate = 264,
    .heads = 2,
    .experts = 4,
    .expert_intermediate = 40,
    .shared_intermediate = 40,
    .dense_layers = 1,
    .latent = {
        .query_rank = 40, .kv_rank = 136, .plain_dim = 48, .rotated_dim = 8, .value_dim = 20}};

constexpr DType kBf16 = DType::bf16;

constexpr std::array<Arch, 16> kArchs = {{
    {"gpt2", 12, DType::f32, kGpt2, list_gpt2},
    {"llama-3.2-1b", 16, kBf16, kLlama32Small, list_decoder},
    {"llama-3.1-70b", 80, kBf16, kLlama31Large, list_decoder},
    {"qwen2.5-0.5b", 24, kBf16, kQwen25Half, list_decoder},
    {"qwen2.5-vl-7b", 28, kBf16, kQwen25Vl, list_qwen25_vl},
    {"qwen3-0.6b", 28, kBf16, kQwen3Small, list_decoder},
    {"qwen3-8b", 36, kBf16, kQwen3Dense, list_decoder},
    {"qwen3-32b", 64, kBf16, kQwen3Large, list_decoder},
    {"qwen3-30b-a3b", 48, kBf16, kQwen3Moe, list_decoder},
    {"qwen3-235b-a22b", 94, kBf16, kQwen3LargeMoe, list_decoder},
    {"qwen3-next-80b-a3b", 48, kBf16, kQwen3Next, list_qwen3_next},
    {"mixtral-8x7b", 32, kBf16, kMixtral, list_mixtral},
    {"gpt-oss-20b", 24, kBf16, kGptOss, list_gpt_oss, "mxfp4.json.in"},
    {"deepseek-v3", 61, kBf16, kDeepseekV3, list_deepseek, "fp8-blocks.json.in"},
    {"tiny-moe", 2, kBf16, kTinyMoe, list_decoder},
    {"tiny-fp8", 3, kBf16, kTinyFp8, list_deepseek, "fp8-blocks.json.in"},
}};

constexpr int kMostLayers = 1000;

int layers_of(const Arch& arch, int layers) {
  if (layers >= 0 && layers <= kMostLayers) return layers == 0 ? arch.layers : layers;
  Facts facts;
  facts.expected = "0 to " + std::to_string(kMostLayers);
  facts.got = std::to_string(layers);
  fail(Category::usage, "not a number of layers", facts);
}

ArchVariant variant_of(const Arch& arch, int layers, std::optional<DType> dtype) {
  ArchVariant variant;
  variant.layers = layers_of(arch, layers);
  variant.dtype = dtype.value_or(arch.dtype);
  variant.is_quantised = !arch.quantization.empty() && !dtype;
  variant.has_mtp = arch.widths.has_mtp && variant.layers == arch.layers;
  return variant;
}

// gpt-oss's layers look at a window and at all by turns.
std::string layer_types(int layers) {
  std::string text;
  for (int layer = 0; layer < layers; ++layer) {
    if (layer > 0) text += ",\n    ";
    text += layer % 2 == 0 ? "\"sliding_attention\"" : "\"full_attention\"";
  }
  return text;
}

// A config has only some of the words.
void replace(std::string& text, std::string_view word, std::string_view by) {
  const size_t at = text.find(word);
  if (at != std::string::npos) text.replace(at, word.size(), by);
}

}  // namespace

std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const Arch& arch : kArchs) names.emplace_back(arch.name);
  return names;
}

const Arch& arch_named(std::string_view name) {
  const auto found = std::find_if(kArchs.begin(), kArchs.end(),
                                  [name](const Arch& arch) { return arch.name == name; });
  if (found != kArchs.end()) return *found;
  std::string known;
  for (const Arch& arch : kArchs) known += (known.empty() ? "" : ", ") + std::string(arch.name);
  Facts facts;
  facts.expected = "one of " + known;
  fail(Category::usage, "no model is called " + printable(name) + nearest_hint(name, arch_names()),
       facts);
}

std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers, std::optional<DType> dtype) {
  return arch.list(arch.widths, variant_of(arch, layers, dtype));
}

std::string arch_config(const Arch& arch, int layers, std::optional<DType> dtype) {
  const ArchVariant variant = variant_of(arch, layers, dtype);
  std::string text(config_file(std::string(arch.name) + ".json.in"));
  replace(text, "@layers", std::to_string(variant.layers));
  replace(text, "@types", layer_types(variant.layers));
  replace(text, "@mtp", variant.has_mtp ? "1" : "0");
  replace(text, "@dtype", torch_name(variant.dtype));
  replace(text, "@quantization", variant.is_quantised ? config_file(arch.quantization) : "");
  return text;
}

}  // namespace modicum
