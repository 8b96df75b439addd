// The tensors of a model by its config.json.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/synth/families.h"

namespace modicum {
namespace {

struct Family {
  std::string_view name;          // model_type
  std::string_view architecture;  // the only one of config.json's `architectures`
  ArchTraits traits;
  void (*list)(TensorList& list, const ArchWidths& widths) = nullptr;  // adds the tensors
  std::string_view quant_method = {};                                  // the only one; empty: none
  // How many layers a model with an MTP layer has, for a family whose config.json does not say
  // whether there is one.
  int64_t layers_with_mtp = 0;
};

constexpr ArchTraits kPlain{};
constexpr ArchTraits kQkvBias{.has_qkv_bias = true};
constexpr ArchTraits kQkNorm{.has_qk_norm = true};
constexpr ArchTraits kExperts{.has_experts = true};
constexpr ArchTraits kQwen3Moe{.has_qk_norm = true, .has_experts = true};
constexpr ArchTraits kQwen3Next{.has_qk_norm = true, .has_query_gate = true, .has_experts = true};
constexpr ArchTraits kGptOss{.has_sinks = true, .has_experts = true};

constexpr std::array<Family, 10> kFamilies = {{
    {"gpt2", "GPT2LMHeadModel", kPlain, list_gpt2},
    {"llama", "LlamaForCausalLM", kPlain, list_llama},
    {"qwen2", "Qwen2ForCausalLM", kQkvBias, list_llama},
    {"qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", kQkvBias, list_qwen25_vl},
    {"qwen3", "Qwen3ForCausalLM", kQkNorm, list_llama},
    {"qwen3_moe", "Qwen3MoeForCausalLM", kQwen3Moe, list_llama},
    {"qwen3_next", "Qwen3NextForCausalLM", kQwen3Next, list_qwen3_next, "", 48},
    {"mixtral", "MixtralForCausalLM", kExperts, list_mixtral},
    {"gpt_oss", "GptOssForCausalLM", kGptOss, list_gpt_oss, "mxfp4"},
    {"deepseek_v3", "DeepseekV3ForCausalLM", kExperts, list_deepseek, "fp8"},
}};

// A member that changes a model's tensors, and its only value for which the lists are right.
struct OnlyValue {
  std::string_view family;  // empty: of all
  const char* key;
  double value = 0;
};
constexpr std::array<OnlyValue, 10> kOnlyValues = {{
    {"", "mlp_bias", 0},
    {"", "mlp_only_layers", 0},  // as many as the array has
    {"", "decoder_sparse_step", 1},
    {"", "moe_layer_freq", 1},
    {"", "n_shared_experts", 1},
    {"", "quantization_config.weight_block_size[0]", 128},
    {"", "quantization_config.weight_block_size[1]", 128},
    {"gpt2", "tie_word_embeddings", 1},
    {"gpt2", "add_cross_attention", 0},
    {"deepseek_v3", "attention_bias", 0},
}};

constexpr int64_t kLargestSize = 1'000'000;
constexpr size_t kMaxTensors = 500'000;

// The members of a config.json by key: "vision_config.depth", "architectures[0]". Booleans are 0 or
// 1, an array has its length. A null counts as absent.
class ConfigMembers {
 public:
  explicit ConfigMembers(const std::string& config) {
    try {
      read_json(config, [this](JsonValue& root) { gather("", root); });
    } catch (const JsonError& error) {
      fail(error.format_category(), error.what(), {.offset = error.offset});
    }
  }

  std::string text(const std::string& key) const {
    const auto found = texts_.find(key);
    return found == texts_.end() ? "" : found->second;
  }
  std::optional<double> value(const std::string& key) const {
    for (const std::string& name : {key, "text_config." + key}) {
      if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
    }
    return std::nullopt;
  }
  // The families have different keys for the same size. Returns the number under the first of
  // `keys` that the config has; 0 if it has none.
  int64_t size(std::initializer_list<const char*> keys) const {
    for (const char* const key : keys) {
      if (const std::optional<double> number = value(key)) return checked(key, *number, 0);
    }
    return 0;
  }
  int64_t size(const char* key) const { return size({key}); }
  // Of a size without which there is no list of tensors.
  int64_t needed(std::initializer_list<const char*> keys, int64_t most = kLargestSize) const {
    return checked(*keys.begin(), static_cast<double>(size(keys)), 1, most);
  }

 private:
  static int64_t checked(const char* key, double number, int64_t least,
                         int64_t most = kLargestSize) {
    if (number >= static_cast<double>(least) && number <= static_cast<double>(most) &&
        number == std::floor(number)) {
      return static_cast<int64_t>(number);
    }
    fail(Category::format_schema, fmt::format("{} is missing or has a wrong value", key),
         {.expected = fmt::format("an integer of {} to {}", least, most),
          .got = fmt::format("{}", number)});
  }

  void gather(const std::string& name, JsonValue& value) {
    switch (value.kind()) {
      case JsonValue::Kind::object:
        return value.object([&](std::string_view key, JsonValue& member) {
          gather((name.empty() ? "" : name + ".") + std::string(key), member);
        });
      case JsonValue::Kind::array: {
        size_t length = 0;
        value.array([&](JsonValue& item) { gather(fmt::format("{}[{}]", name, length++), item); });
        numbers_[name] = static_cast<double>(length);
        return;
      }
      case JsonValue::Kind::number: return gather_number(name, value);
      case JsonValue::Kind::boolean: numbers_[name] = value.boolean() ? 1 : 0; return;
      case JsonValue::Kind::string: texts_[name] = value.string(); return;
      case JsonValue::Kind::null: return;
    }
  }
  void gather_number(const std::string& name, JsonValue& value) {
    try {
      numbers_[name] = value.number();
    } catch (const JsonError& error) {
      if (error.fault != JsonFault::range) throw;  // a number that no size has
    }
  }

  std::map<std::string, double> numbers_;
  std::map<std::string, std::string> texts_;
};

[[noreturn]] void refuse(const std::string& what, std::string expected, const std::string& got) {
  fail(Category::unsupported, what, {.expected = std::move(expected), .got = printable(got)});
}

const Family& family_of(const ConfigMembers& members) {
  const std::string type = members.text("model_type");
  std::vector<std::string_view> names;
  for (const Family& family : kFamilies) {
    if (family.name == type) return family;
    names.push_back(family.name);
  }
  refuse("the tensors of this model_type are not known from config.json alone",
         fmt::format("a checkpoint, or a model_type of {}", fmt::join(names, ", ")),
         type.empty() ? "no model_type" : type);
}

void require_plain(const Family& family, const ConfigMembers& members) {
  const std::string architecture = members.text("architectures[0]");
  if (!architecture.empty() && architecture != family.architecture) {
    refuse("the tensors of this architecture are not known from config.json alone",
           std::string(family.architecture), architecture);
  }
  const std::string method = members.text("quantization_config.quant_method");
  if (!method.empty() && method != family.quant_method) {
    refuse(
        "the tensors of this quantization are not known from config.json alone",
        std::string(family.quant_method.empty() ? "no quantization_config" : family.quant_method),
        method);
  }
  for (const OnlyValue& only : kOnlyValues) {
    if (!only.family.empty() && only.family != family.name) continue;
    const double got = members.value(only.key).value_or(only.value);
    if (got == only.value) continue;
    refuse(fmt::format("the tensors with this {} are not known from config.json alone", only.key),
           fmt::format("{}", only.value), fmt::format("{}", got));
  }
}

DType dtype_of(const ConfigMembers& members) {
  for (const char* const key : {"dtype", "torch_dtype", "text_config.dtype"}) {
    const std::string name = members.text(key);
    const std::optional<DType> dtype = dtype_from_torch_name(name);
    if (dtype && is_castable(*dtype)) return *dtype;
    if (!name.empty()) refuse("dtype is none of a model", "float32, bfloat16 or float16", name);
  }
  fail(Category::format_schema, "dtype is missing, without which sizes are not known",
       {.expected = R"("dtype": "float32", "bfloat16" or "float16")"});
}

ArchVariant variant_of(const Family& family, const ConfigMembers& members) {
  ArchVariant variant;
  variant.layers = static_cast<int>(members.needed({"num_hidden_layers", "n_layer"}, kMaxLayers));
  variant.dtype = dtype_of(members);
  variant.is_quantised = !members.text("quantization_config.quant_method").empty();
  variant.mtp_layers = static_cast<int>(members.size("num_nextn_predict_layers"));
  if (variant.layers == family.layers_with_mtp) variant.mtp_layers = 1;
  return variant;
}

ArchWidths::LinearAttention linear_of(const ConfigMembers& members) {
  return {members.needed({"full_attention_interval"}), members.size("linear_num_key_heads"),
          members.size("linear_key_head_dim"),         members.size("linear_num_value_heads"),
          members.size("linear_value_head_dim"),       members.size("linear_conv_kernel_dim")};
}

ArchWidths::Tower tower_of(const ConfigMembers& members) {
  return {members.size("vision_config.depth"),
          members.size("vision_config.hidden_size"),
          members.size("vision_config.intermediate_size"),
          members.size({"vision_config.in_chans", "vision_config.in_channels"}),
          members.size("vision_config.temporal_patch_size"),
          members.size("vision_config.patch_size"),
          members.size("vision_config.spatial_merge_size")};
}

ArchWidths widths_of(const Family& family, const ConfigMembers& members) {
  ArchWidths w{family.traits};
  w.vocab = members.size("vocab_size");
  w.hidden = members.size({"hidden_size", "n_embd"});
  w.intermediate = members.size({"intermediate_size", "n_inner"});
  if (family.name == "gpt2" && w.intermediate == 0) w.intermediate = 4 * w.hidden;
  w.heads = members.needed({"num_attention_heads", "n_head"});
  w.kv_heads = members.size("num_key_value_heads");
  if (family.name == "llama" && w.kv_heads == 0) w.kv_heads = w.heads;  // as of its first version
  w.head_dim = members.value("head_dim") ? members.size("head_dim") : w.hidden / w.heads;
  w.positions = members.size("n_positions");
  if (w.has_experts) {
    w.experts = members.needed({"num_experts", "num_local_experts", "n_routed_experts"});
  }
  w.expert_intermediate = members.size({"moe_intermediate_size", "intermediate_size"});
  w.shared_intermediate =
      members.size({"shared_expert_intermediate_size", "moe_intermediate_size"});
  w.dense_layers = members.size("first_k_dense_replace");
  w.is_tied = members.size("tie_word_embeddings") != 0;
  w.has_o_bias = members.size("attention_bias") != 0;
  w.has_qkv_bias = w.has_qkv_bias || w.has_o_bias;
  w.latent = {members.size("q_lora_rank"), members.size("kv_lora_rank"),
              members.size("qk_nope_head_dim"), members.size("qk_rope_head_dim"),
              members.size("v_head_dim")};
  if (family.name == "qwen3_next") w.linear = linear_of(members);
  w.tower = tower_of(members);
  return w;
}

}  // namespace

void TensorList::add(std::string fqn, DType dtype, std::vector<int64_t> shape) {
  const bool has_size = std::find(shape.begin(), shape.end(), 0) == shape.end();
  if (!has_size || !checked_bytes(dtype, shape) || tensors_.size() == kMaxTensors) {
    fail(Category::format_schema, "a size is missing or too large",
         {.tensor = std::move(fqn), .got = shape_text(shape)});
  }
  tensors_.push_back({std::move(fqn), Role::param, dtype, std::move(shape)});
}

std::vector<TensorSpec> config_tensors(const std::string& config) {
  const ConfigMembers members(config);
  const Family& family = family_of(members);
  require_plain(family, members);
  TensorList list(variant_of(family, members));
  family.list(list, widths_of(family, members));
  return list.take();
}

}  // namespace modicum
