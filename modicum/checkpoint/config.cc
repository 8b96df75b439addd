// Reads config.json: two members on which loaded values depend (tie_word_embeddings and the block
// size of FP8 scales), and three that are only displayed (model_type, architectures and
// quant_method).
#include <fmt/format.h>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

using Kind = JsonValue::Kind;

constexpr std::array<std::string_view, 6> kKinds = {"an object", "an array",  "a string",
                                                    "a number",  "a boolean", "null"};

// The text of a warning: the file, what happened, the offset, expected and got.
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
  ConfigReader(std::string_view text, std::vector<std::string>& warnings)
      : text_(text), warnings_(warnings) {}

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
    // With a fault in one place, a size that was read in another place is not used either.
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
      in_ = "text_config.";
      value.object([this](std::string_view key, JsonValue& v) { model_member(key, v); });
      in_.clear();
      return;
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
      if (key == "quant_method" && member.kind() == Kind::string) {
        config_.quant_method = member.string();
      }
    });
  }

  // [rows, columns].
  void block_size(JsonValue& value) {
    constexpr const char* kKey = "quantization_config.weight_block_size";
    constexpr const char* kExpected = "two positive integers";
    if (value.kind() != Kind::array) return no_block_size(fault(kKey, kExpected, value));
    const uint64_t offset = value.offset();
    std::vector<int64_t> sizes;
    std::string got;
    value.array([&](JsonValue& element) {
      constexpr size_t kMaxShown = 4;
      if (sizes.size() < kMaxShown) got += (sizes.empty() ? "" : ", ") + shown(element);
      if (sizes.size() == kMaxShown) got += ", ...";
      sizes.push_back(size_or_zero(element));
    });
    if (sizes.size() != 2 || sizes[0] < 1 || sizes[1] < 1) {
      return no_block_size(fault(kKey, kExpected, offset, fmt::format("[{}]", got)));
    }
    const MatrixSize size{sizes[0], sizes[1]};
    if (const auto& other = config_.weight_block_size; other && *other != size) {
      return no_block_size(Error(Category::format_schema,
                                 fmt::format("{} and {}{} differ", size_path_, in_, kKey),
                                 {.file = kConfigFile,
                                  .offset = offset,
                                  .expected = fmt::format("[{}, {}]", (*other)[0], (*other)[1]),
                                  .got = fmt::format("[{}]", got)}));
    }
    config_.weight_block_size = size;
    size_path_ = in_ + kKey;
  }

  // A number's text; of any other value the kind, such as "a string".
  std::string shown(JsonValue& value) const {
    if (value.kind() != Kind::number) return kind_of(value);
    const std::string_view rest = text_.substr(value.offset());
    return printable(rest.substr(0, rest.find_first_of(",] \t\r\n")));
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

  // A null has the same meaning as a missing key.
  static bool is_absent(JsonValue& value) { return value.kind() == Kind::null; }

  static std::string kind_of(JsonValue& value) {
    return std::string(kKinds.at(static_cast<size_t>(value.kind())));
  }

  Error fault(std::string_view key, const char* expected, JsonValue& value) const {
    return fault(key, expected, value.offset(), kind_of(value));
  }
  Error fault(std::string_view key, const char* expected, uint64_t offset, std::string got) const {
    return {Category::format_schema,
            fmt::format("{}{} has a wrong value", in_, key),
            {.file = kConfigFile, .offset = offset, .expected = expected, .got = std::move(got)}};
  }
  void warn(const Error& what) { warnings_.push_back(text_of(what)); }

  const std::string_view text_;
  std::vector<std::string>& warnings_;
  ModelConfig config_;
  std::string in_;         // the path of the object that is read: "" or "text_config."
  std::string size_path_;  // of config_.weight_block_size
};

}  // namespace

ModelConfig parse_config(const std::string& text, std::vector<std::string>& warnings) {
  const size_t warnings_before = warnings.size();
  try {
    ModelConfig config;
    read_json(text, [&](JsonValue& root) { config = ConfigReader(text, warnings).read(root); });
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
