#include <fmt/format.h>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

using Kind = JsonValue::Kind;

bool says_true(JsonValue& value) { return value.kind() == Kind::boolean && value.boolean(); }

// Two positive integers; null, say, where scales are per tensor.
std::optional<MatrixSize> read_block_size(JsonValue& value) {
  if (value.kind() != Kind::array) return std::nullopt;
  std::vector<int64_t> sizes;
  value.array([&](JsonValue& element) {
    if (element.kind() != Kind::number) return;
    try {
      sizes.push_back(element.integer());
    } catch (const JsonError& error) {
      if (error.fault != JsonFault::range) throw;
      sizes.push_back(0);
    }
  });
  if (sizes.size() != 2 || sizes[0] < 1 || sizes[1] < 1) return std::nullopt;
  return MatrixSize{sizes[0], sizes[1]};
}

void read_quantization(JsonValue& value, ModelConfig& config) {
  if (value.kind() != Kind::object) return;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "weight_block_size") config.weight_block_size = read_block_size(member);
  });
}

void read_text_config(JsonValue& value, ModelConfig& config) {
  if (value.kind() != Kind::object) return;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "tie_word_embeddings" && says_true(member)) config.tie_word_embeddings = true;
    if (key == "quantization_config") read_quantization(member, config);
  });
}

// Members of another type than ours are somebody else's: passed over.
void read_member(std::string_view key, JsonValue& value, ModelConfig& config) {
  const Kind kind = value.kind();
  if (key == "model_type" && kind == Kind::string) config.model_type = value.string();
  if (key == "tie_word_embeddings" && says_true(value)) config.tie_word_embeddings = true;
  if (key == "text_config") read_text_config(value, config);
  if (key == "quantization_config") read_quantization(value, config);
  if (key != "architectures" || kind != Kind::array) return;
  value.array([&](JsonValue& name) {
    if (name.kind() == Kind::string) config.architectures.push_back(name.string());
  });
}

}  // namespace

ModelConfig parse_config(const std::string& text, std::vector<std::string>& warnings) {
  try {
    ModelConfig config;
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& value) { read_member(key, value, config); });
    });
    return config;
  } catch (const JsonError& error) {
    warnings.push_back(fmt::format("config.json: {} (offset {})", error.what(), error.offset));
    return {};
  }
}

}  // namespace modicum
