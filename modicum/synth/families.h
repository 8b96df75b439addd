// One function per family of architectures. It adds the model's tensors under their hub names, in
// the order of the state dict. Internal to `synth`.
#pragma once

#include <string>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/synth/arch.h"

namespace modicum {

// Collects tensors in the order of the calls of `add`. The default dtype is the variant's. Throws
// FORMAT.SCHEMA for a shape with an empty dim, which comes from a size that config.json lacks, and
// for tensors that are too large or too many.
class TensorList {
 public:
  explicit TensorList(const ArchVariant& variant) : variant_(variant) {}

  void add(std::string fqn, std::vector<int64_t> shape) {
    add(std::move(fqn), variant_.dtype, std::move(shape));
  }
  void add(std::string fqn, DType dtype, std::vector<int64_t> shape);
  const ArchVariant& variant() const noexcept { return variant_; }
  std::vector<TensorSpec> take() { return std::move(tensors_); }

 private:
  const ArchVariant variant_;
  std::vector<TensorSpec> tensors_;
};

// NAME.weight [out, in] and, if `has_bias`, NAME.bias [out].
void add_linear(TensorList& list, const std::string& name, int64_t out, int64_t in, bool has_bias);
// gate_proj, up_proj and down_proj.
void add_gated_mlp(TensorList& list, const std::string& prefix, int64_t hidden,
                   int64_t intermediate);
// The projections of queries, keys, values and output; norms and sinks if `w` has them.
void add_attention(TensorList& list, const std::string& prefix, const ArchWidths& w);

// A dense MLP, or a router and gated experts.
void add_qwen_mlp(TensorList& list, const std::string& layer, const ArchWidths& w);
// The two norms of a layer.
void add_norms(TensorList& list, const std::string& prefix, const ArchWidths& w);
// Embedding, layers, norm and, unless it is tied, the head. Calls `add_layer` for each layer, with
// a prefix such as "model.layers.0.".
void add_decoder(TensorList& list, const ArchWidths& w,
                 FunctionRef<void(int layer, const std::string& prefix)> add_layer);

void list_gpt2(TensorList& list, const ArchWidths& w);
// Llama, Qwen 2.5 and Qwen 3.
void list_llama(TensorList& list, const ArchWidths& w);
// Like list_llama, with other names for the router and the experts.
void list_mixtral(TensorList& list, const ArchWidths& w);
void list_qwen25_vl(TensorList& list, const ArchWidths& w);
void list_gpt_oss(TensorList& list, const ArchWidths& w);
// The following two end with the variant's MTP layers.
void list_qwen3_next(TensorList& list, const ArchWidths& w);
void list_deepseek(TensorList& list, const ArchWidths& w);

}  // namespace modicum
