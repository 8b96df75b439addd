// The models that can be synthesised, as data: one row each, and one function per family of them
// that lists the tensors.
#pragma once

#include <cstdint>
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
  bool is_tied = false;  // no lm_head
  bool has_qkv_bias = false;
  bool has_qk_norm = false;
};

struct Arch {
  std::string_view name;  // as `--arch` takes it
  int layers = 0;
  DType dtype = DType::bf16;  // on the hub
  ArchWidths widths;
  std::vector<TensorSpec> (*list)(const Arch& arch, int layers) = nullptr;
  std::string_view config;  // config.json with @layers and @dtype to be filled in
};

std::vector<std::string> arch_names();
const Arch& arch_named(std::string_view name);  // USAGE, with the nearest name

// All tensors under their hub names, in the order of the model's state dict (in which transformers
// fills its files). `layers` 0 is the model's own number; negative or over 1000: USAGE.
std::vector<TensorSpec> arch_tensors(const Arch& arch, int layers = 0);

// config.json as it stands on the hub but for the number of layers and the dtype.
std::string arch_config(const Arch& arch, int layers, DType dtype);

}  // namespace modicum
