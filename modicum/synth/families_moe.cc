#include "modicum/base/base.h"
#include "modicum/synth/families.h"

namespace modicum {
namespace {

constexpr int64_t kScaleBlock = 128;   // FP8: a scale per block of 128 rows x 128 columns of codes
constexpr int64_t kMxBlock = 32;       // MXFP4: a scale per 32 neighbouring codes of a row
constexpr int64_t kMxBlockBytes = 16;  // 32 codes, two per byte

// gpt-oss has one tensor for all experts: weights [experts, in, out], or MXFP4 codes and a second
// tensor of their scales, in blocks along the input dim.
void add_packed_experts(TensorList& list, const std::string& name, int64_t experts, int64_t in,
                        int64_t out) {
  if (list.variant().is_quantised) {
    list.add(name + "_blocks", DType::u8, {experts, out, in / kMxBlock, kMxBlockBytes});
    list.add(name + "_scales", DType::u8, {experts, out, in / kMxBlock});
  } else {
    list.add(name, {experts, in, out});
  }
  list.add(name + "_bias", {experts, out});
}

// Qwen3-Next's gated delta rule.
void add_linear_attention(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  const ArchWidths::LinearAttention& linear = w.linear;
  const int64_t keys = linear.key_heads * linear.key_dim;
  const int64_t values = linear.value_heads * linear.value_dim;
  list.add(prefix + "dt_bias", {linear.value_heads});
  list.add(prefix + "A_log", {linear.value_heads});
  list.add(prefix + "conv1d.weight", {2 * keys + values, 1, linear.kernel});
  // qkvz: queries, keys, values and a gate. ba: beta and alpha, one of each per value head.
  add_linear(list, prefix + "in_proj_qkvz", 2 * keys + 2 * values, w.hidden, false);
  add_linear(list, prefix + "in_proj_ba", 2 * linear.value_heads, w.hidden, false);
  list.add(prefix + "norm.weight", {linear.value_dim});
  add_linear(list, prefix + "out_proj", w.hidden, values, false);
}

void add_qwen3_next_layer(TensorList& list, const std::string& prefix, const ArchWidths& w,
                          bool has_full_attention) {
  if (has_full_attention) {
    add_attention(list, prefix + "self_attn.", w);
  } else {
    add_linear_attention(list, prefix + "linear_attn.", w);
  }
  add_qwen_mlp(list, prefix, w);
  add_gated_mlp(list, prefix + "mlp.shared_expert.", w.hidden, w.shared_intermediate);
  add_linear(list, prefix + "mlp.shared_expert_gate", 1, w.hidden, false);
  add_norms(list, prefix, w);
}

void add_qwen3_next_mtp(TensorList& list, const ArchWidths& w) {
  add_linear(list, "mtp.fc", w.hidden, 2 * w.hidden, false);
  add_qwen3_next_layer(list, "mtp.layers.0.", w, true);
  list.add("mtp.norm.weight", {w.hidden});
  list.add("mtp.pre_fc_norm_embedding.weight", {w.hidden});
  list.add("mtp.pre_fc_norm_hidden.weight", {w.hidden});
}

// DeepSeek-V3: FP8 codes and one scale per block; blocks at the edges may be smaller. If the
// variant is not quantised, a weight without scales.
void add_coded(TensorList& list, const std::string& name, int64_t out, int64_t in) {
  if (!list.variant().is_quantised) return add_linear(list, name, out, in, false);
  list.add(name + ".weight", DType::f8_e4m3, {out, in});
  list.add(name + ".weight_scale_inv", DType::f32,
           {ceil_div(out, kScaleBlock), ceil_div(in, kScaleBlock)});
}

void add_coded_mlp(TensorList& list, const std::string& prefix, int64_t hidden,
                   int64_t intermediate) {
  add_coded(list, prefix + "gate_proj", intermediate, hidden);
  add_coded(list, prefix + "up_proj", intermediate, hidden);
  add_coded(list, prefix + "down_proj", hidden, intermediate);
}

// Multi-head latent attention. Queries are projected down and up again, and so are keys and values
// together. All heads share the part of the key that has rotary embedding.
void add_latent_attention(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  const ArchWidths::LatentAttention& latent = w.latent;
  add_coded(list, prefix + "q_a_proj", latent.query_rank, w.hidden);
  list.add(prefix + "q_a_layernorm.weight", {latent.query_rank});
  add_coded(list, prefix + "q_b_proj", w.heads * (latent.plain_dim + latent.rotated_dim),
            latent.query_rank);
  add_coded(list, prefix + "kv_a_proj_with_mqa", latent.kv_rank + latent.rotated_dim, w.hidden);
  list.add(prefix + "kv_a_layernorm.weight", {latent.kv_rank});
  add_coded(list, prefix + "kv_b_proj", w.heads * (latent.plain_dim + latent.value_dim),
            latent.kv_rank);
  add_coded(list, prefix + "o_proj", w.hidden, w.heads * latent.value_dim);
}

void add_deepseek_experts(TensorList& list, const std::string& prefix, const ArchWidths& w) {
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    const std::string name = prefix + "experts." + std::to_string(expert) + ".";
    add_coded_mlp(list, name, w.hidden, w.expert_intermediate);
  }
  add_linear(list, prefix + "gate", w.experts, w.hidden, false);
  // The router's bias is fp32 for every dtype of the model.
  list.add(prefix + "gate.e_score_correction_bias", DType::f32, {w.experts});
  add_coded_mlp(list, prefix + "shared_experts.", w.hidden, w.shared_intermediate);
}

void add_deepseek_layer(TensorList& list, int layer, const std::string& prefix,
                        const ArchWidths& w) {
  add_latent_attention(list, prefix + "self_attn.", w);
  if (layer < w.dense_layers) {
    add_coded_mlp(list, prefix + "mlp.", w.hidden, w.intermediate);
  } else {
    add_deepseek_experts(list, prefix + "mlp.", w);
  }
  add_norms(list, prefix, w);
}

// The MTP layer has the next layer number. The hub's files store the model's embedding and head a
// second time, under the names of this layer.
void add_deepseek_mtp(TensorList& list, int layer, const ArchWidths& w) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  list.add(prefix + "embed_tokens.weight", {w.vocab, w.hidden});
  list.add(prefix + "enorm.weight", {w.hidden});
  list.add(prefix + "hnorm.weight", {w.hidden});
  add_linear(list, prefix + "eh_proj", w.hidden, 2 * w.hidden, false);
  add_deepseek_layer(list, layer, prefix, w);
  list.add(prefix + "shared_head.norm.weight", {w.hidden});
  add_linear(list, prefix + "shared_head.head", w.vocab, w.hidden, false);
}

}  // namespace

void list_gpt_oss(TensorList& list, const ArchWidths& w) {
  add_decoder(list, w, [&](int, const std::string& prefix) {
    const std::string experts = prefix + "mlp.experts.";
    add_attention(list, prefix + "self_attn.", w);
    add_linear(list, prefix + "mlp.router", w.experts, w.hidden, true);
    add_packed_experts(list, experts + "gate_up_proj", w.experts, w.hidden,
                       2 * w.expert_intermediate);
    add_packed_experts(list, experts + "down_proj", w.experts, w.expert_intermediate, w.hidden);
    add_norms(list, prefix, w);
  });
}

void list_qwen3_next(TensorList& list, const ArchWidths& w) {
  add_decoder(list, w, [&](int layer, const std::string& prefix) {
    add_qwen3_next_layer(list, prefix, w, (layer + 1) % w.linear.interval == 0);
  });
  if (list.variant().mtp_layers > 0) add_qwen3_next_mtp(list, w);
}

void list_deepseek(TensorList& list, const ArchWidths& w) {
  add_decoder(list, w, [&](int layer, const std::string& prefix) {
    add_deepseek_layer(list, layer, prefix, w);
  });
  const auto [layers, dtype, is_quantised, mtp_layers] = list.variant();
  for (int i = 0; i < mtp_layers; ++i) add_deepseek_mtp(list, layers + i, w);
}

}  // namespace modicum
