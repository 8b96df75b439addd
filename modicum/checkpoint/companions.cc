// The files of a saved model that are not weights.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

// A part of a text and its replacement.
struct Edit {
  size_t begin = 0;
  size_t end = 0;
  std::string with;
};

// The end of the JSON value that begins at `at`. The text must be valid JSON.
size_t end_of_value(std::string_view text, size_t at) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = at; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    }
    if (depth < 0 || (depth == 0 && !in_string && c == ',')) return i;
    const bool is_closed = depth == 0 && !in_string && (c == '"' || c == '}' || c == ']');
    if (is_closed) return i + 1;
  }
  return text.size();
}

// The opening quote of the key whose value begins at `begin`. The key may have \u escapes, but no
// escaped quote.
size_t begin_of_key(std::string_view text, size_t begin) {
  const size_t closing = text.rfind('"', begin - 1);
  return text.rfind('"', closing - 1);
}

// Removes the member whose value is at [begin, end), with the comma after it. The last member of an
// object has none, so the comma before it is removed.
Edit removed_member(std::string_view text, size_t begin, size_t end) {
  Edit edit{begin_of_key(text, begin), end, ""};
  const size_t next = text.find_first_not_of(" \t\r\n", end);
  if (next != std::string_view::npos && text[next] == ',') {
    edit.end = text.find_first_not_of(" \t\r\n", next + 1);
  } else {
    const size_t before = text.find_last_not_of(" \t\r\n", edit.begin - 1);
    if (text[before] == ',') edit.begin = before;
  }
  return edit;
}

class ConfigEdits {
 public:
  ConfigEdits(std::string_view text, const ConfigChange& change) : text_(text), change_(change) {}

  void object(JsonValue& value) {
    Section section{.begin = value.offset()};
    value.object([&](std::string_view key, JsonValue& member) {
      const size_t begin = member.offset();
      const JsonValue::Kind kind = member.kind();
      const auto& [form, vocabulary] = change_;
      if (form && (key == "dtype" || key == "torch_dtype") && kind == JsonValue::Kind::string) {
        edits.push_back(
            {begin, end_of_value(text_, begin), fmt::format("\"{}\"", torch_name(form->dtype))});
      } else if (form && key == "quantization_config") {
        if (form->has_codes) return;
        edits.push_back(removed_member(text_, begin, end_of_value(text_, begin)));
      } else if (key == "model_type" && kind == JsonValue::Kind::string) {
        section.model_type = member.string();
      } else if (vocabulary && key == vocabulary->key) {
        const size_t end = text_.find_last_not_of(" \t\r\n", end_of_value(text_, begin) - 1) + 1;
        section.tokens = Edit{begin, end, std::to_string(vocabulary->tokens)};
      } else if (kind == JsonValue::Kind::object) {
        object(member);
      }
    });
    sections_.push_back(std::move(section));
  }

  // Adds the edits of the vocabulary, once `object` has read the text. Returns whether there are
  // any.
  bool add_vocabulary() {
    const Vocabulary& vocabulary = *change_.vocabulary;
    const size_t before = edits.size();
    for (const Section& section : sections_) {
      if (section.model_type != vocabulary.model_type) continue;
      const size_t inside = section.begin + 1;  // it has a member: model_type
      edits.push_back(section.tokens.value_or(
          Edit{inside, inside, fmt::format("\"{}\": {},", vocabulary.key, vocabulary.tokens)}));
    }
    if (edits.size() > before) return true;
    for (const Section& section : sections_) {
      if (section.model_type != vocabulary.outer_type || !section.tokens) continue;
      edits.push_back(*section.tokens);
    }
    return edits.size() > before;
  }

  std::vector<Edit> edits;

 private:
  // A config of the text.
  struct Section {
    size_t begin = 0;
    std::string model_type;
    std::optional<Edit> tokens;  // that of the member of the vocabulary
  };
  const std::string_view text_;
  const ConfigChange& change_;
  std::vector<Section> sections_;
};

}  // namespace

std::vector<std::string> companion_files(const Checkpoint& checkpoint) {
  static constexpr std::array<std::string_view, 7> kEndings = {
      ".json", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".spm"};
  std::vector<std::string> names;
  for (const std::string& name : checkpoint.files->list(checkpoint.directory)) {
    const bool has_ending = std::any_of(kEndings.begin(), kEndings.end(),
                                        [&](std::string_view end) { return name.ends_with(end); });
    if (!has_ending || name.front() == '.' || name.ends_with(".index.json")) continue;
    if (name == "manifest.json") continue;  // the record of a saved checkpoint
    if (!checkpoint.files->is_directory(join_path(checkpoint.directory, name))) {
      names.push_back(name);
    }
  }
  return names;
}

NewConfig config_of(const std::string& config, const ConfigChange& change) {
  if (!change.form && !change.vocabulary) return {config};
  ConfigEdits found(config, change);
  try {
    read_json(config, [&](JsonValue& root) { found.object(root); });
  } catch (const JsonError&) {
    return {config, !change.vocabulary};  // opening the checkpoint has warned about it
  }
  const bool has_vocabulary = !change.vocabulary || found.add_vocabulary();
  // From the last edit to the first, so that the offsets of the remaining edits stay valid.
  std::string text = config;
  std::sort(found.edits.begin(), found.edits.end(), [](const Edit& a, const Edit& b) {
    return std::pair(a.begin, a.end) > std::pair(b.begin, b.end);
  });
  for (const Edit& edit : found.edits) text.replace(edit.begin, edit.end - edit.begin, edit.with);
  return {std::move(text), has_vocabulary};
}

void FormTally::add(const TensorSpec& saved, const StoredTensor* stored) {
  if (!is_castable(saved.dtype)) {  // FP8 codes, or a dtype that is never cast
    has_codes_ = has_codes_ || (stored != nullptr && stored->scale);
    return;
  }
  bytes_[saved.dtype] += bytes_of(saved.dtype, numel_of(saved.shape));
  is_changed_ = is_changed_ || (stored != nullptr && stored->spec.dtype != saved.dtype);
}

std::optional<NewForm> FormTally::new_form() const {
  if (!is_changed_) return std::nullopt;
  const auto most_bytes =
      std::max_element(bytes_.begin(), bytes_.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return NewForm{most_bytes->first, has_codes_};
}

namespace {

constexpr const char* kCopyItself = "copy the file itself into the directory";

// config.json, which a save or a conversion must not leave out.
std::string config_text(File* file) {
  if (file != nullptr) return read_text(*file, kLongestConfig, Category::format_limit);
  fail(Category::io, fmt::format("a link out of the checkpoint's directory; {}", kCopyItself),
       {.file = kConfigFile});
}

}  // namespace

Companions copy_companions(const Checkpoint& source, const std::vector<std::string>& names,
                           const ConfigChange& change, FileSystem& files,
                           const std::string& directory) {
  Companions all;
  if (names.empty()) return all;
  const std::vector<std::string> directories = own_directories(*source.files, source.directory);
  for (const std::string& name : names) {
    const std::string from = join_path(source.directory, name);
    const auto leave_out = [&](std::string_view why) {
      all.warnings.push_back(fmt::format("{} was not copied: {}", printable(name), why));
    };
    if (name == kConfigFile) {
      const std::string stored = config_text(source.files->open_own(from, directories).get());
      const auto [text, has_vocabulary] = config_of(stored, change);
      if (!has_vocabulary) {
        all.warnings.push_back(fmt::format(
            "{} lacks a config with model_type {} for the model's {} tokens: set its {}", name,
            printable(change.vocabulary->model_type), change.vocabulary->tokens,
            change.vocabulary->key));
      }
      write_durably(files, join_path(directory, name), text);
      all.copied.push_back({name, text.size(), text.size(), digest_of(text)});
    } else if (!is_utf8(name)) {
      leave_out("its name is not UTF-8");
    } else if (!source.files->exists(from)) {
      leave_out("it is a link to a file that does not exist");
    } else if (const auto file = source.files->open_own(from, directories); file == nullptr) {
      leave_out(fmt::format("it is a link to {}, out of the checkpoint's directory; {}",
                            printable(source.files->link_target(from)), kCopyItself));
    } else if (const auto copied = copy_durably(*file, files, join_path(directory, name))) {
      all.copied.push_back({name, copied->bytes, copied->bytes, copied->digest});
    } else {
      leave_out("it was being written");
    }
  }
  return all;
}

}  // namespace modicum
