// The models that can be synthesised, as data: one row each, and one function per family of them
// that lists the tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// What the shapes are made of. 0 where a family has no such thing.
struct ArchWidths {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of the dense MLP
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t positions = 0;  // of learned position embeddings
  int64_t experts = 0;    // 0: a dense MLP
  int64_t expert_intermediate = 0;
  int64_t shared_intermediate = 0;  // of the expert that every token meets
  int64_t dense_layers = 0;         // so many come before the layers of experts
  bool is_tied = false;             // no lm_head
  bool has_qkv_bias = false;
  bool has_o_bias = false;
  bool has_qk_norm = false;
  bool has_query_gate = false;
  bool has_sinks = false;
  bool has_mtp = false;  // one more layer that predicts the token after the next

  // DeepSeek's attention: keys and values come out of a vector of kv_rank.
  struct LatentAttention {
    int64_t query_rank = 0;
    int64_t kv_rank = 0;
    int64_t plain_dim = 0;    // of a head's query and key, the part without positions
    int64_t rotated_dim = 0;  // and the part with them
    int64_t value_dim = 0;
  } latent = {};

  // Qwen3-Next's gated delta rule, in all layers but every `interval`-th.
  struct LinearAttention {
    int64_t interval = 0;
    int64_t key_heads = 0;
    int64_t key_dim = 0;
    int64_t value_heads = 0;
    int64_t value_dim = 0;
    int64_t kernel = 0;  // of the convolution
  } linear = {};

  // What looks at images. `--layers` leaves it whole.
  struct Tower {
    int64_t depth = 0;
    int64_t hidden = 0;
    int64_t intermediate = 0;
    int64_t channels = 0;
    int64_t frames = 0;
    int64_t patch = 0;
    int64_t merge = 0;
  } tower = {};
};

// Which tensors of a model are wanted.
struct ArchVariant {
  int layers = 0;
  DType dtype = DType::bf16;  // of all that is neither a code nor a scale
  bool is_quantised = false;
  bool has_mtp = false;
};

struct Arch {
  std::string_view name;  // as `--arch` takes it
  int layers = 0;
  DType dtype = DType::bf16;  // on the hub
  ArchWidths widths;
  std::vector<TensorSpec> (*list)(const ArchWidths& widths, const ArchVariant& variant) = nullptr;
  std::string_view quantization = {};  // file in configs/ with the lines for @quantization
};

std::vector<std::string> arch_names();
const Arch& arch_named(std::string_view name);  // USAGE, with the nearest name

// All tensors under their hub names, in the order of the model's state dict (in which transformers
// fills its files).
//
// `layers` 0 is the model's own number; negative or over 1000: USAGE. A layer that predicts the
// token after the next (`model.layers.61.*`, `mtp.*`) is there only at the model's own number.
//
// Without `dtype` all is as on the hub, codes and scales included. With it there are none: every
// weight has that dtype (but for router biases, which stay in fp32), as in a model that has been
// dequantised.
std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers = 0,
                                     std::optional<DType> dtype = {});

// config.json as it stands on the hub but for the number of layers and the dtype; both as above.
std::string arch_config(const Arch& arch, int layers = 0, std::optional<DType> dtype = {});

}  // namespace modicum
