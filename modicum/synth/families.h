// The lists of tensors of the families that arch.cc's rows belong to, under their hub names and in
// the order of the model's state dict. Internal to `synth`.
#pragma once

#include <string>
#include <vector>

#include "modicum/synth/arch.h"

namespace modicum {

// Tensors in the order in which they are added; of the model's dtype where none is said.
class TensorList {
 public:
  explicit TensorList(const ArchVariant& variant) : variant_(variant) {}

  void add(std::string fqn, std::vector<int64_t> shape) {
    add(std::move(fqn), variant_.dtype, std::move(shape));
  }
  void add(std::string fqn, DType dtype, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(fqn), Role::param, dtype, std::move(shape)});
  }
  const ArchVariant& variant() const noexcept { return variant_; }
  std::vector<TensorSpec> take() { return std::move(tensors_); }

 private:
  ArchVariant variant_;
  std::vector<TensorSpec> tensors_;
};

// NAME.weight [out, in], and NAME.bias [out] where it has one.
void add_linear(TensorList& list, const std::string& name, int64_t out, int64_t in, bool has_bias);
// gate_proj, up_proj and down_proj.
void add_gated_mlp(TensorList& list, const std::string& prefix, int64_t hidden,
                   int64_t intermediate);
// Queries, keys, values, output and what norms and sinks it has.
void add_attention(TensorList& list, const std::string& prefix, const ArchWidths& w);

std::vector<TensorSpec> list_gpt2(const ArchWidths& w, const ArchVariant& variant);
// What Llama and its many relatives share; Mixtral's experts have names of their own.
std::vector<TensorSpec> list_decoder(const ArchWidths& w, const ArchVariant& variant);
std::vector<TensorSpec> list_mixtral(const ArchWidths& w, const ArchVariant& variant);
std::vector<TensorSpec> list_qwen25_vl(const ArchWidths& w, const ArchVariant& variant);
std::vector<TensorSpec> list_gpt_oss(const ArchWidths& w, const ArchVariant& variant);
// The whole ones end with a layer that predicts the token after the next.
std::vector<TensorSpec> list_qwen3_next(const ArchWidths& w, const ArchVariant& variant);
std::vector<TensorSpec> list_deepseek(const ArchWidths& w, const ArchVariant& variant);

}  // namespace modicum
