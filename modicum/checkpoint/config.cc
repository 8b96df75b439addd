// config.json: two members on which loaded values depend (ties, FP8 block size), and two that are
// only displayed.
#include <fmt/format.h>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

using Kind = JsonValue::Kind;

constexpr std::array<std::string_view, 6> kKinds = {"an object", "an array",  "a string",
                                                    "a number",  "a boolean", "null"};

// The text of a warning: the error's text without its category.
std::string text_of(const Error& fault) {
  const Facts& facts = fault.facts();
  std::string text = fmt::format("{}: {}", facts.file, fault.what_happened());
  if (facts.offset) text += fmt::format(" at byte {}", *facts.offset);
  if (!facts.expected.empty()) text += fmt::format("; expected {}", facts.expected);
  if (!facts.got.empty()) text += fmt::format(", got {}", facts.got);
  return text;
}

class ConfigReader {
 public:
  explicit ConfigReader(std::vector<std::string>& warnings) : warnings_(warnings) {}

  ModelConfig read(JsonValue& root) {
    root.object([this](std::string_view key, JsonValue& value) {
      if (key == "model_type") {
        model_type(value);
      } else if (key == "architectures") {
        architectures(value);
      } else if (key == "text_config") {
        text_config(value);
      } else {
        model_member(key, value);
      }
    });
    if (config_.block_size_fault) config_.weight_block_size.reset();
    return std::move(config_);
  }

 private:
  // A member of the root or of a nested text_config.
  void model_member(std::string_view key, JsonValue& value) {
    if (key == "tie_word_embeddings") tie(value);
    if (key == "quantization_config") quantization(value);
  }

  void model_type(JsonValue& value) {
    if (is_absent(value)) return;
    if (value.kind() != Kind::string) return warn(fault("model_type", "a string", value));
    config_.model_type = value.string();
  }

  void architectures(JsonValue& value) {
    if (is_absent(value)) return;
    constexpr const char* kExpected = "an array of strings";
    if (value.kind() != Kind::array) return warn(fault("architectures", kExpected, value));
    value.array([&](JsonValue& name) {
      if (name.kind() != Kind::string) return warn(fault("architectures", kExpected, name));
      config_.architectures.push_back(name.string());
    });
  }

  void text_config(JsonValue& value) {
    if (is_absent(value)) return;
    if (value.kind() == Kind::object) {
      return value.object([this](std::string_view key, JsonValue& v) { model_member(key, v); });
    }
    const Error what = fault("text_config", "an object", value);
    config_.tie_fault = config_.block_size_fault = what;
    warn(what);
  }

  void tie(JsonValue& value) {
    if (is_absent(value)) return;
    if (value.kind() == Kind::boolean) {
      if (value.boolean()) config_.tie_word_embeddings = true;
      return;
    }
    config_.tie_fault = fault("tie_word_embeddings", "true or false", value);
    warn(*config_.tie_fault);
  }

  void quantization(JsonValue& value) {
    if (is_absent(value)) return;
    if (value.kind() != Kind::object) {
      return no_block_size(fault("quantization_config", "an object", value));
    }
    value.object([this](std::string_view key, JsonValue& member) {
      if (key == "weight_block_size" && !is_absent(member)) block_size(member);
    });
  }

  // Rows and columns.
  void block_size(JsonValue& value) {
    const Error not_two = fault("weight_block_size", "two positive integers", value);
    if (value.kind() != Kind::array) return no_block_size(not_two);
    std::vector<int64_t> sizes;
    value.array([&](JsonValue& element) { sizes.push_back(size_or_zero(element)); });
    if (sizes.size() != 2 || sizes[0] < 1 || sizes[1] < 1) return no_block_size(not_two);
    const MatrixSize size{sizes[0], sizes[1]};
    if (config_.weight_block_size && *config_.weight_block_size != size) {
      return no_block_size(Error(Category::format_schema,
                                 "two quantization_config with different weight_block_size",
                                 {.file = kConfigFile, .offset = not_two.facts().offset}));
    }
    config_.weight_block_size = size;
  }

  static int64_t size_or_zero(JsonValue& value) {
    if (value.kind() != Kind::number) return 0;
    try {
      return value.integer();
    } catch (const JsonError& error) {
      if (error.fault != JsonFault::range) throw;
      return 0;
    }
  }

  void no_block_size(const Error& what) {
    config_.block_size_fault = what;
    warn(what);
  }

  // A null is treated like a missing key.
  static bool is_absent(JsonValue& value) { return value.kind() == Kind::null; }

  static Error fault(std::string_view key, const char* expected, JsonValue& value) {
    return {Category::format_schema,
            fmt::format("{} has a wrong value", key),
            {.file = kConfigFile,
             .offset = value.offset(),
             .expected = expected,
             .got = std::string(kKinds.at(static_cast<size_t>(value.kind())))}};
  }
  void warn(const Error& what) { warnings_.push_back(text_of(what)); }

  std::vector<std::string>& warnings_;
  ModelConfig config_;
};

}  // namespace

ModelConfig parse_config(const std::string& text, std::vector<std::string>& warnings) {
  const size_t warnings_before = warnings.size();
  try {
    ModelConfig config;
    read_json(text, [&](JsonValue& root) { config = ConfigReader(warnings).read(root); });
    return config;
  } catch (const JsonError& error) {
    warnings.resize(warnings_before);
    return unread_config(
        Error(error.format_category(), error.what(), {.file = kConfigFile, .offset = error.offset}),
        warnings);
  }
}

ModelConfig unread_config(const Error& fault, std::vector<std::string>& warnings) {
  warnings.push_back(text_of(fault));
  ModelConfig config;
  config.tie_fault = config.block_size_fault = fault;
  return config;
}

}  // namespace modicum
