#include <fmt/format.h>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

using Kind = JsonValue::Kind;

bool says_true(JsonValue& value) { return value.kind() == Kind::boolean && value.boolean(); }

void read_text_config(JsonValue& value, ModelConfig& config) {
  if (value.kind() != Kind::object) return;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "tie_word_embeddings" && says_true(member)) config.tie_word_embeddings = true;
  });
}

// Members of another type than ours are somebody else's: passed over.
void read_member(std::string_view key, JsonValue& value, ModelConfig& config) {
  const Kind kind = value.kind();
  if (key == "model_type" && kind == Kind::string) config.model_type = value.string();
  if (key == "tie_word_embeddings" && says_true(value)) config.tie_word_embeddings = true;
  if (key == "text_config") read_text_config(value, config);
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
