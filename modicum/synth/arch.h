// The table of the architectures that `synth` knows, and the lists of their tensors. "The hub" is
// the Hugging Face Hub.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// Properties that determine a model's tensors, of all models of a family.
struct ArchTraits {
  bool has_qkv_bias = false;
  bool has_qk_norm = false;
  bool has_query_gate = false;  // q_proj makes queries and, of the same width, gates
  bool has_sinks = false;       // attention sinks: one learned number per head
  bool has_experts = false;
};

// The sizes that determine the shapes of a model's tensors, from config.json. A size that the
// model's family does not use has no meaning.
struct ArchWidths : ArchTraits {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // width of the dense MLP
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t positions = 0;  // number of learned position embeddings
  int64_t experts = 0;    // 0: a dense MLP
  int64_t expert_intermediate = 0;
  int64_t shared_intermediate = 0;  // width of the shared expert, which processes every token
  int64_t dense_layers = 0;         // how many layers, from the first, have a dense MLP
  bool is_tied = false;             // lm_head is the embedding, and not stored
  bool has_o_bias = false;

  // DeepSeek's multi-head latent attention: keys and values are projected up from a vector of
  // `kv_rank` numbers.
  struct LatentAttention {
    int64_t query_rank = 0;
    int64_t kv_rank = 0;
    int64_t plain_dim = 0;    // the part of a head's query and key without rotary embedding
    int64_t rotated_dim = 0;  // the part with rotary embedding
    int64_t value_dim = 0;
  } latent = {};

  // Qwen3-Next's gated delta rule. Every `interval`-th layer has full attention instead.
  struct LinearAttention {
    int64_t interval = 0;
    int64_t key_heads = 0;
    int64_t key_dim = 0;
    int64_t value_heads = 0;
    int64_t value_dim = 0;
    int64_t kernel = 0;  // width of the convolution
  } linear = {};

  // The vision tower. `--layers` does not shorten it.
  struct Tower {
    int64_t depth = 0;
    int64_t hidden = 0;
    int64_t intermediate = 0;
    int64_t channels = 0;
    int64_t frames = 0;  // in a patch
    int64_t patch = 0;   // its width and height
    int64_t merge = 0;   // merge x merge patches become one token
  } tower = {};
};

// The number of layers and the dtype, which may differ from the hub's.
struct ArchVariant {
  int layers = 0;
  DType dtype = DType::bf16;  // of all tensors except codes, scales and DeepSeek's router biases
  bool is_quantised = false;
  int mtp_layers = 0;  // multi-token prediction: more layers, for the tokens after the next
};

struct Arch {
  std::string_view name;  // a value of `--arch`; its config.json is configs/NAME.json.in
  int layers = 0;
  DType dtype = DType::bf16;  // the hub's
  // The file in configs/ with the lines for @quantization; empty: not quantised.
  std::string_view quantization = {};
  int mtp_layers = 0;
};

constexpr int kMaxLayers = 1000;

std::vector<std::string> arch_names();
// Throws USAGE, with the nearest name, if `name` is unknown.
const Arch& arch_named(std::string_view name);

// All tensors under their hub names, in the order of the model's state dict (the order in which
// transformers fills its files).
//
// `layers` 0 means the hub's number of layers. Throws USAGE if `layers` is negative or over
// kMaxLayers.
// The MTP layer (`model.layers.61.*`, `mtp.*`) is included only with the hub's number of layers.
//
// Without `dtype` all tensors have the hub's dtypes, codes and scales included. With `dtype` the
// model is dequantised: there are no scales, and every weight has that dtype, except DeepSeek's
// router biases, which are always fp32.
std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers = 0,
                                     std::optional<DType> dtype = {});

// The tensors of a model by the text of its config.json, as arch_tensors lists them. The families
// are those of the architectures. Throws FORMAT.JSON if the text is no valid JSON, FORMAT.SCHEMA if
// a size is missing or out of range, and UNSUPPORTED if config.json is of another family or has a
// member whose effect on the tensors is not known.
std::vector<TensorSpec> config_tensors(const std::string& config);

// The hub's config.json with this number of layers and dtype (see arch_tensors).
std::string arch_config(const Arch& arch, int layers = 0, std::optional<DType> dtype = {});

}  // namespace modicum
