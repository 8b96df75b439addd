#include "modicum/synth/families.h"

namespace modicum {
namespace {

// GPT-2's Conv1D keeps its weight as [in, out].
void add_conv1d(TensorList& list, const std::string& name, int64_t in, int64_t out) {
  list.add(name + ".weight", {in, out});
  list.add(name + ".bias", {out});
}

void add_layer_norm(TensorList& list, const std::string& name, int64_t width) {
  list.add(name + ".weight", {width});
  list.add(name + ".bias", {width});
}

void add_gpt2_layer(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  add_layer_norm(list, prefix + "ln_1", w.hidden);
  // The causal mask, a buffer. The hub's file has it; the models of current transformers do not.
  list.add(prefix + "attn.bias", {1, 1, w.positions, w.positions});
  add_conv1d(list, prefix + "attn.c_attn", w.hidden, 3 * w.hidden);
  add_conv1d(list, prefix + "attn.c_proj", w.hidden, w.hidden);
  add_layer_norm(list, prefix + "ln_2", w.hidden);
  add_conv1d(list, prefix + "mlp.c_fc", w.hidden, w.intermediate);
  add_conv1d(list, prefix + "mlp.c_proj", w.intermediate, w.hidden);
}

void add_mixtral_mlp(TensorList& list, const std::string& layer, const ArchWidths& w) {
  const std::string prefix = layer + "block_sparse_moe.";
  add_linear(list, prefix + "gate", w.experts, w.hidden, false);
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    const std::string name = prefix + "experts." + std::to_string(expert) + ".";
    add_linear(list, name + "w1", w.expert_intermediate, w.hidden, false);
    add_linear(list, name + "w2", w.hidden, w.expert_intermediate, false);
    add_linear(list, name + "w3", w.expert_intermediate, w.hidden, false);
  }
}

void add_tower_block(TensorList& list, const std::string& prefix, const ArchWidths::Tower& tower) {
  list.add(prefix + "norm1.weight", {tower.hidden});
  list.add(prefix + "norm2.weight", {tower.hidden});
  add_linear(list, prefix + "attn.qkv", 3 * tower.hidden, tower.hidden, true);
  add_linear(list, prefix + "attn.proj", tower.hidden, tower.hidden, true);
  add_linear(list, prefix + "mlp.gate_proj", tower.intermediate, tower.hidden, true);
  add_linear(list, prefix + "mlp.up_proj", tower.intermediate, tower.hidden, true);
  add_linear(list, prefix + "mlp.down_proj", tower.hidden, tower.intermediate, true);
}

// Patch embedding, blocks, and a merger that turns `merge` x `merge` patches into one token.
void add_tower(TensorList& list, const ArchWidths::Tower& tower, int64_t hidden) {
  list.add("visual.patch_embed.proj.weight",
           {tower.hidden, tower.channels, tower.frames, tower.patch, tower.patch});
  for (int64_t block = 0; block < tower.depth; ++block) {
    add_tower_block(list, "visual.blocks." + std::to_string(block) + ".", tower);
  }
  const int64_t merged = tower.hidden * tower.merge * tower.merge;
  list.add("visual.merger.ln_q.weight", {tower.hidden});
  add_linear(list, "visual.merger.mlp.0", merged, merged, true);
  add_linear(list, "visual.merger.mlp.2", hidden, merged, true);
}

}  // namespace

void add_linear(TensorList& list, const std::string& name, int64_t out, int64_t in, bool has_bias) {
  list.add(name + ".weight", {out, in});
  if (has_bias) list.add(name + ".bias", {out});
}

void add_gated_mlp(TensorList& list, const std::string& prefix, int64_t hidden,
                   int64_t intermediate) {
  add_linear(list, prefix + "gate_proj", intermediate, hidden, false);
  add_linear(list, prefix + "up_proj", intermediate, hidden, false);
  add_linear(list, prefix + "down_proj", hidden, intermediate, false);
}

void add_attention(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  const int64_t query = w.heads * w.head_dim;
  const int64_t key = w.kv_heads * w.head_dim;
  if (w.has_sinks) list.add(prefix + "sinks", {w.heads});
  // The projection of the queries may also produce a gate of the same width.
  add_linear(list, prefix + "q_proj", w.has_query_gate ? 2 * query : query, w.hidden,
             w.has_qkv_bias);
  add_linear(list, prefix + "k_proj", key, w.hidden, w.has_qkv_bias);
  add_linear(list, prefix + "v_proj", key, w.hidden, w.has_qkv_bias);
  add_linear(list, prefix + "o_proj", w.hidden, query, w.has_o_bias);
  if (!w.has_qk_norm) return;
  list.add(prefix + "q_norm.weight", {w.head_dim});
  list.add(prefix + "k_norm.weight", {w.head_dim});
}

void add_qwen_mlp(TensorList& list, const std::string& layer, const ArchWidths& w) {
  const std::string prefix = layer + "mlp.";
  if (w.experts == 0) return add_gated_mlp(list, prefix, w.hidden, w.intermediate);
  add_linear(list, prefix + "gate", w.experts, w.hidden, false);
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    const std::string name = prefix + "experts." + std::to_string(expert) + ".";
    add_gated_mlp(list, name, w.hidden, w.expert_intermediate);
  }
}

void add_norms(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  list.add(prefix + "input_layernorm.weight", {w.hidden});
  list.add(prefix + "post_attention_layernorm.weight", {w.hidden});
}

void add_decoder(TensorList& list, const ArchWidths& w,
                 FunctionRef<void(int layer, const std::string& prefix)> add_layer) {
  list.add("model.embed_tokens.weight", {w.vocab, w.hidden});
  for (int layer = 0; layer < list.variant().layers; ++layer) {
    add_layer(layer, "model.layers." + std::to_string(layer) + ".");
  }
  list.add("model.norm.weight", {w.hidden});
  if (!w.is_tied) list.add("lm_head.weight", {w.vocab, w.hidden});
}

void list_gpt2(TensorList& list, const ArchWidths& w) {
  list.add("wte.weight", {w.vocab, w.hidden});
  list.add("wpe.weight", {w.positions, w.hidden});
  for (int layer = 0; layer < list.variant().layers; ++layer) {
    add_gpt2_layer(list, "h." + std::to_string(layer) + ".", w);
  }
  add_layer_norm(list, "ln_f", w.hidden);
}

void list_llama(TensorList& list, const ArchWidths& w) {
  add_decoder(list, w, [&](int, const std::string& prefix) {
    add_attention(list, prefix + "self_attn.", w);
    add_qwen_mlp(list, prefix, w);
    add_norms(list, prefix, w);
  });
}

void list_mixtral(TensorList& list, const ArchWidths& w) {
  add_decoder(list, w, [&](int, const std::string& prefix) {
    add_attention(list, prefix + "self_attn.", w);
    add_mixtral_mlp(list, prefix, w);
    add_norms(list, prefix, w);
  });
}

void list_qwen25_vl(TensorList& list, const ArchWidths& w) {
  add_tower(list, w.tower, w.hidden);
  list_llama(list, w);
}

}  // namespace modicum
