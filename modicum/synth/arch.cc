#include "modicum/synth/arch.h"

#include <array>
#include <map>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/synth/configs.h"
#include "modicum/synth/families.h"

namespace modicum {
namespace {

constexpr ArchTraits kPlain{};
constexpr ArchTraits kQkvBias{.has_qkv_bias = true};
constexpr ArchTraits kQkNorm{.has_qk_norm = true};
constexpr ArchTraits kGptOss{.has_qkv_bias = true, .has_o_bias = true, .has_sinks = true};
constexpr ArchTraits kQwen3Next{.has_qk_norm = true, .has_query_gate = true, .has_mtp = true};

constexpr DType kBf16 = DType::bf16;

// tiny-moe and tiny-fp8 are for tests. tiny-moe has the tensors of qwen3_moe in a few KB; most
// numbers of ranks don't divide its widths. tiny-fp8 has the tensors of DeepSeek-V3 in 0.6 MB,
// with incomplete scale blocks at both edges. It lacks the MTP layer, which transformers recognises
// only by the layer number 61.
constexpr std::array<Arch, 16> kArchs = {{
    {"gpt2", 12, DType::f32, kPlain, list_gpt2},
    {"llama-3.2-1b", 16, kBf16, kPlain, list_llama},
    {"llama-3.1-70b", 80, kBf16, kPlain, list_llama},
    {"qwen2.5-0.5b", 24, kBf16, kQkvBias, list_llama},
    {"qwen2.5-vl-7b", 28, kBf16, kQkvBias, list_qwen25_vl},
    {"qwen3-0.6b", 28, kBf16, kQkNorm, list_llama},
    {"qwen3-8b", 36, kBf16, kQkNorm, list_llama},
    {"qwen3-32b", 64, kBf16, kQkNorm, list_llama},
    {"qwen3-30b-a3b", 48, kBf16, kQkNorm, list_llama},
    {"qwen3-235b-a22b", 94, kBf16, kQkNorm, list_llama},
    {"qwen3-next-80b-a3b", 48, kBf16, kQwen3Next, list_qwen3_next},
    {"mixtral-8x7b", 32, kBf16, kPlain, list_mixtral},
    {"gpt-oss-20b", 24, kBf16, kGptOss, list_gpt_oss, "mxfp4.json.in"},
    {"deepseek-v3", 61, kBf16, {.has_mtp = true}, list_deepseek, "fp8-blocks.json.in"},
    {"tiny-moe", 2, kBf16, kQkNorm, list_llama},
    {"tiny-fp8", 3, kBf16, kPlain, list_deepseek, "fp8-blocks.json.in"},
}};

constexpr int kMostLayers = 1000;

int layers_of(const Arch& arch, int layers) {
  if (layers >= 0 && layers <= kMostLayers) return layers == 0 ? arch.layers : layers;
  fail(Category::usage, "the number of layers is out of range",
       {.expected = "0 to " + std::to_string(kMostLayers), .got = std::to_string(layers)});
}

ArchVariant variant_of(const Arch& arch, int layers, std::optional<DType> dtype) {
  ArchVariant variant;
  variant.layers = layers_of(arch, layers);
  variant.dtype = dtype.value_or(arch.dtype);
  variant.is_quantised = !arch.quantization.empty() && !dtype;
  variant.has_mtp = arch.traits.has_mtp && variant.layers == arch.layers;
  return variant;
}

// gpt-oss's layers alternate between windowed and full attention.
std::string layer_types(int layers) {
  std::string text;
  for (int layer = 0; layer < layers; ++layer) {
    if (layer > 0) text += ",\n    ";
    text += layer % 2 == 0 ? "\"sliding_attention\"" : "\"full_attention\"";
  }
  return text;
}

// Does nothing if `text` lacks `word`: not every config has every placeholder.
void replace(std::string& text, std::string_view word, std::string_view by) {
  const size_t at = text.find(word);
  if (at != std::string::npos) text.replace(at, word.size(), by);
}

// The numbers and booleans of a config by key. Keys of a nested object have its key as a prefix:
// "vision_config.depth".
using Numbers = std::map<std::string, int64_t>;

void gather(JsonValue& object, const std::string& prefix, Numbers& numbers) {
  object.object([&](std::string_view key, JsonValue& value) {
    const std::string name = prefix + std::string(key);
    const JsonValue::Kind kind = value.kind();
    if (kind == JsonValue::Kind::object) gather(value, name + ".", numbers);
    if (kind == JsonValue::Kind::number) numbers[name] = static_cast<int64_t>(value.number());
    if (kind == JsonValue::Kind::boolean) numbers[name] = value.boolean() ? 1 : 0;
  });
}

ArchWidths widths_of(const Arch& arch) {
  Numbers numbers;
  read_json(arch_config(arch), [&](JsonValue& root) { gather(root, "", numbers); });
  // The families have different keys for the same size. Returns the number under the first of
  // `keys` that the config has; 0 if it has none.
  const auto first_of = [&](std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
      if (const auto found = numbers.find(key); found != numbers.end()) return found->second;
    }
    return int64_t{0};
  };
  const auto number = [&](const char* key) { return first_of({key}); };

  ArchWidths w{arch.traits};
  w.vocab = number("vocab_size");
  w.hidden = first_of({"hidden_size", "n_embd"});
  // GPT-2's config has no n_inner: it defaults to four times the hidden size.
  w.intermediate = numbers.contains("n_embd") ? 4 * w.hidden : number("intermediate_size");
  w.heads = first_of({"num_attention_heads", "n_head"});
  w.kv_heads = number("num_key_value_heads");
  w.head_dim = numbers.contains("head_dim") ? number("head_dim") : w.hidden / w.heads;
  w.positions = number("n_positions");
  w.experts = first_of({"num_experts", "num_local_experts", "n_routed_experts"});
  w.expert_intermediate = first_of({"moe_intermediate_size", "intermediate_size"});
  w.shared_intermediate = first_of({"shared_expert_intermediate_size", "moe_intermediate_size"});
  w.dense_layers = number("first_k_dense_replace");
  w.is_tied = number("tie_word_embeddings") != 0;
  w.latent = {number("q_lora_rank"), number("kv_lora_rank"), number("qk_nope_head_dim"),
              number("qk_rope_head_dim"), number("v_head_dim")};
  w.linear = {number("full_attention_interval"), number("linear_num_key_heads"),
              number("linear_key_head_dim"),     number("linear_num_value_heads"),
              number("linear_value_head_dim"),   number("linear_conv_kernel_dim")};
  w.tower = {number("vision_config.depth"),
             number("vision_config.hidden_size"),
             number("vision_config.intermediate_size"),
             number("vision_config.in_chans"),
             number("vision_config.temporal_patch_size"),
             number("vision_config.patch_size"),
             number("vision_config.spatial_merge_size")};
  return w;
}

}  // namespace

std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const Arch& arch : kArchs) names.emplace_back(arch.name);
  return names;
}

const Arch& arch_named(std::string_view name) { return row_named("architecture", name, kArchs); }

std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers, std::optional<DType> dtype) {
  TensorList list(variant_of(arch, layers, dtype));
  arch.list(list, widths_of(arch));
  return list.take();
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
