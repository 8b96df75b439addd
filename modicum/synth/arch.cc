#include "modicum/synth/arch.h"

#include <array>

#include "modicum/base/base.h"
#include "modicum/synth/configs.h"

namespace modicum {
namespace {

constexpr DType kBf16 = DType::bf16;

// tiny-moe and tiny-fp8 are for tests. tiny-moe has the tensors of qwen3_moe in a few KB; most
// numbers of ranks don't divide its widths. tiny-fp8 has the tensors of DeepSeek-V3 in 0.6 MB,
// with incomplete scale blocks at both edges. It lacks the MTP layer, which transformers recognises
// only by the layer number 61.
constexpr std::array<Arch, 16> kArchs = {{
    {"gpt2", 12, DType::f32},
    {"llama-3.2-1b", 16, kBf16},
    {"llama-3.1-70b", 80, kBf16},
    {"qwen2.5-0.5b", 24, kBf16},
    {"qwen2.5-vl-7b", 28, kBf16},
    {"qwen3-0.6b", 28, kBf16},
    {"qwen3-8b", 36, kBf16},
    {"qwen3-32b", 64, kBf16},
    {"qwen3-30b-a3b", 48, kBf16},
    {"qwen3-235b-a22b", 94, kBf16},
    {"qwen3-next-80b-a3b", 48, kBf16},
    {"mixtral-8x7b", 32, kBf16},
    {"gpt-oss-20b", 24, kBf16, "mxfp4.json.in"},
    {"deepseek-v3", 61, kBf16, "fp8-blocks.json.in", 1},
    {"tiny-moe", 2, kBf16},
    {"tiny-fp8", 3, kBf16, "fp8-blocks.json.in"},
}};

int layers_of(const Arch& arch, int layers) {
  if (layers >= 0 && layers <= kMaxLayers) return layers == 0 ? arch.layers : layers;
  fail(Category::usage, "the number of layers is out of range",
       {.expected = "0 to " + std::to_string(kMaxLayers), .got = std::to_string(layers)});
}

ArchVariant variant_of(const Arch& arch, int layers, std::optional<DType> dtype) {
  ArchVariant variant;
  variant.layers = layers_of(arch, layers);
  variant.dtype = dtype.value_or(arch.dtype);
  variant.is_quantised = !arch.quantization.empty() && !dtype;
  if (variant.layers == arch.layers) variant.mtp_layers = arch.mtp_layers;
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

}  // namespace

std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const Arch& arch : kArchs) names.emplace_back(arch.name);
  return names;
}

const Arch& arch_named(std::string_view name) { return row_named("architecture", name, kArchs); }

std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers, std::optional<DType> dtype) {
  return config_tensors(arch_config(arch, layers, dtype));
}

std::string arch_config(const Arch& arch, int layers, std::optional<DType> dtype) {
  const ArchVariant variant = variant_of(arch, layers, dtype);
  std::string text(config_file(std::string(arch.name) + ".json.in"));
  replace(text, "@layers", std::to_string(variant.layers));
  replace(text, "@types", layer_types(variant.layers));
  replace(text, "@mtp", std::to_string(variant.mtp_layers));
  replace(text, "@dtype", torch_name(variant.dtype));
  replace(text, "@quantization", variant.is_quantised ? config_file(arch.quantization) : "");
  return text;
}

}  // namespace modicum
