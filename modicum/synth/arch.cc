#include "modicum/synth/arch.h"

#include <algorithm>
#include <array>

#include "modicum/base/base.h"
#include "modicum/synth/configs.h"
#include "modicum/synth/configs_moe.h"

namespace modicum {
namespace {

// Tensors of one dtype, in the order in which they are added.
class List {
 public:
  explicit List(DType dtype) : dtype_(dtype) {}

  void add(std::string fqn, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(fqn), Role::param, dtype_, std::move(shape)});
  }
  std::vector<TensorSpec> take() { return std::move(tensors_); }

 private:
  DType dtype_;
  std::vector<TensorSpec> tensors_;
};

// GPT-2's Conv1D keeps its weight as [in, out].
void add_conv1d(List& list, const std::string& name, int64_t in, int64_t out) {
  list.add(name + ".weight", {in, out});
  list.add(name + ".bias", {out});
}

void add_layer_norm(List& list, const std::string& name, int64_t width) {
  list.add(name + ".weight", {width});
  list.add(name + ".bias", {width});
}

void add_gpt2_layer(List& list, const std::string& prefix, const ArchWidths& w) {
  add_layer_norm(list, prefix + "ln_1", w.hidden);
  // The causal mask: a buffer that today's code no longer has, but the hub's file still does.
  list.add(prefix + "attn.bias", {1, 1, w.positions, w.positions});
  add_conv1d(list, prefix + "attn.c_attn", w.hidden, 3 * w.hidden);
  add_conv1d(list, prefix + "attn.c_proj", w.hidden, w.hidden);
  add_layer_norm(list, prefix + "ln_2", w.hidden);
  add_conv1d(list, prefix + "mlp.c_fc", w.hidden, w.intermediate);
  add_conv1d(list, prefix + "mlp.c_proj", w.intermediate, w.hidden);
}

std::vector<TensorSpec> list_gpt2(const Arch& arch, int layers) {
  const ArchWidths& w = arch.widths;
  List list(arch.dtype);
  list.add("wte.weight", {w.vocab, w.hidden});
  list.add("wpe.weight", {w.positions, w.hidden});
  for (int layer = 0; layer < layers; ++layer) {
    add_gpt2_layer(list, "h." + std::to_string(layer) + ".", w);
  }
  add_layer_norm(list, "ln_f", w.hidden);
  return list.take();
}

void add_linear(List& list, const std::string& name, int64_t out, int64_t in, bool has_bias) {
  list.add(name + ".weight", {out, in});
  if (has_bias) list.add(name + ".bias", {out});
}

void add_attention(List& list, const std::string& prefix, const ArchWidths& w) {
  const int64_t query = w.heads * w.head_dim;
  const int64_t key = w.kv_heads * w.head_dim;
  add_linear(list, prefix + "q_proj", query, w.hidden, w.has_qkv_bias);
  add_linear(list, prefix + "k_proj", key, w.hidden, w.has_qkv_bias);
  add_linear(list, prefix + "v_proj", key, w.hidden, w.has_qkv_bias);
  add_linear(list, prefix + "o_proj", w.hidden, query, false);
  if (!w.has_qk_norm) return;
  list.add(prefix + "q_norm.weight", {w.head_dim});
  list.add(prefix + "k_norm.weight", {w.head_dim});
}

void add_gated_mlp(List& list, const std::string& prefix, int64_t hidden, int64_t intermediate) {
  add_linear(list, prefix + "gate_proj", intermediate, hidden, false);
  add_linear(list, prefix + "up_proj", intermediate, hidden, false);
  add_linear(list, prefix + "down_proj", hidden, intermediate, false);
}

void add_mlp(List& list, const std::string& prefix, const ArchWidths& w) {
  if (w.experts == 0) return add_gated_mlp(list, prefix, w.hidden, w.intermediate);
  add_linear(list, prefix + "gate", w.experts, w.hidden, false);
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    const std::string name = prefix + "experts." + std::to_string(expert) + ".";
    add_gated_mlp(list, name, w.hidden, w.expert_intermediate);
  }
}

// The decoder that Llama and its many relatives share.
std::vector<TensorSpec> list_decoder(const Arch& arch, int layers) {
  const ArchWidths& w = arch.widths;
  List list(arch.dtype);
  list.add("model.embed_tokens.weight", {w.vocab, w.hidden});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add_attention(list, prefix + "self_attn.", w);
    add_mlp(list, prefix + "mlp.", w);
    list.add(prefix + "input_layernorm.weight", {w.hidden});
    list.add(prefix + "post_attention_layernorm.weight", {w.hidden});
  }
  list.add("model.norm.weight", {w.hidden});
  if (!w.is_tied) list.add("lm_head.weight", {w.vocab, w.hidden});
  return list.take();
}

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

constexpr ArchWidths kQwen3Moe{.vocab = 151936,
                               .hidden = 2048,
                               .heads = 32,
                               .kv_heads = 4,
                               .head_dim = 128,
                               .experts = 128,
                               .expert_intermediate = 768,
                               .has_qk_norm = true};

// For tests: as the row above, in a few KB, with widths that divide evenly by little.
constexpr ArchWidths kTinyMoe{.vocab = 13,
                              .hidden = 6,
                              .heads = 3,
                              .kv_heads = 1,
                              .head_dim = 2,
                              .experts = 4,
                              .expert_intermediate = 5,
                              .has_qk_norm = true};

constexpr std::array<Arch, 5> kArchs = {{
    {"gpt2", 12, DType::f32, kGpt2, list_gpt2, kGpt2Config},
    {"qwen2.5-0.5b", 24, DType::bf16, kQwen25Half, list_decoder, kQwen25HalfConfig},
    {"qwen3-0.6b", 28, DType::bf16, kQwen3Small, list_decoder, kQwen3SmallConfig},
    {"qwen3-30b-a3b", 48, DType::bf16, kQwen3Moe, list_decoder, kQwen3MoeConfig},
    {"tiny-moe", 2, DType::bf16, kTinyMoe, list_decoder, kTinyMoeConfig},
}};

constexpr int kMostLayers = 1000;

int layers_of(const Arch& arch, int layers) {
  if (layers >= 0 && layers <= kMostLayers) return layers == 0 ? arch.layers : layers;
  Facts facts;
  facts.expected = "0 to " + std::to_string(kMostLayers);
  facts.got = std::to_string(layers);
  fail(Category::usage, "not a number of layers", facts);
}

void replace(std::string& text, std::string_view placeholder, const std::string& by) {
  const size_t at = text.find(placeholder);
  MODICUM_ASSERT(at != std::string::npos);
  text.replace(at, placeholder.size(), by);
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
  const std::string nearest = nearest_name(name, arch_names());
  const std::string hint = nearest.empty() ? "" : "; did you mean " + nearest + "?";
  std::string known;
  for (const Arch& arch : kArchs) known += (known.empty() ? "" : ", ") + std::string(arch.name);
  Facts facts;
  facts.expected = "one of " + known;
  fail(Category::usage, "no model is called " + printable(name) + hint, facts);
}

std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers) {
  return arch.list(arch, layers_of(arch, layers));
}

std::string arch_config(const Arch& arch, int layers, DType dtype) {
  std::string text(arch.config.substr(1));  // the raw literal's first line break
  replace(text, "@layers", std::to_string(layers_of(arch, layers)));
  replace(text, "@dtype", std::string(torch_name(dtype)));
  return text;
}

}  // namespace modicum
