#include "modicum/cli/program_double.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "modicum/ranks/thread_ranks_double.h"

namespace modicum {

Document::Document(JsonValue& value) : kind_(value.kind()) {
  switch (kind_) {
    case JsonValue::Kind::object:
      value.object([this](std::string_view key, JsonValue& member) {
        members_.emplace(std::string(key), Document(member));
      });
      break;
    case JsonValue::Kind::array:
      value.array([this](JsonValue& element) { elements_.push_back(Document(element)); });
      break;
    case JsonValue::Kind::string: text_ = value.string(); break;
    case JsonValue::Kind::number: number_ = value.number(); break;
    case JsonValue::Kind::boolean: is_true_ = value.boolean(); break;
    case JsonValue::Kind::null: value.null(); break;
  }
}

Document Document::parse(std::string_view text) {
  Document document;
  read_json(text, [&](JsonValue& root) { document = Document(root); });
  return document;
}

const Document& Document::operator[](const std::string& key) const {
  const auto found = members_.find(key);
  if (found == members_.end()) throw std::out_of_range("no key " + key);
  return found->second;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

RunResult ThreadedProgram::run(const std::vector<std::string>& words) const {
  RunResult ended;
  const auto print = [&](std::string_view text) { ended.out += text; };
  const auto print_error = [&](std::string_view text, int) { ended.err += text; };
  ended.code = run_command_line(words, {.files = files_,
                                        .run_ranks = run_ranks_in_threads,
                                        .print = print,
                                        .write_error = print_error});
  return ended;
}

RunResult ThreadedProgram::run(std::string_view line) const {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < line.size();) {
    const size_t end = std::min(line.find(' ', begin), line.size());
    if (end > begin) words.emplace_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return run(words);
}

Document ThreadedProgram::succeed(std::string_view line) const {
  const RunResult ended = run(std::string(line) + " --json");
  EXPECT_EQ(ended.code, 0) << line << "\n" << ended.out << ended.err;
  return ended.code == 0 ? ended.json() : Document::parse("{}");
}

Document ThreadedProgram::refuse(int code, std::string_view line) const {
  const RunResult ended = run(std::string(line) + " --json");
  EXPECT_EQ(ended.code, code) << line << "\n" << ended.out << ended.err;
  EXPECT_TRUE(ended.err.starts_with("modicum: ")) << ended.err;
  if (ended.code == 0) return Document::parse(R"({"category":"","message":""})");
  const Document error = ended.error();
  EXPECT_EQ(error["code"].number(), code);
  EXPECT_FALSE(error["category"].text().empty() || error["message"].text().empty()) << ended.out;
  return error;
}

std::string checkpoint_file(const std::vector<MadeTensor>& tensors) {
  JsonWriter header;
  header.begin_object();
  std::string data;
  for (const MadeTensor& tensor : tensors) {
    int64_t numel = 1;
    header.key(tensor.name).begin_object().member("dtype", tensor.dtype).key("shape").begin_array();
    for (const int64_t size : tensor.shape) {
      header.value(size);
      numel *= size;
    }
    const size_t begin = data.size();
    uint64_t state = 0;
    for (const char c : tensor.name) state = state * 257 + static_cast<unsigned char>(c);
    for (int64_t i = 0; i < numel; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      const float value = (static_cast<float>(state >> 40) / 0x1p24F - 0.5F) * 0.14F;
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      if (tensor.dtype == "I64") {
        data += std::string(1, static_cast<char>(i)) + std::string(7, '\0');
      } else if (tensor.dtype == "F32") {
        for (int byte = 0; byte < 4; ++byte) data += static_cast<char>(bits >> (8 * byte));
      } else {  // BF16
        data += static_cast<char>(bits >> 16);
        data += static_cast<char>(bits >> 24);
      }
    }
    header.end_array().key("data_offsets").begin_array().value(begin).value(data.size());
    header.end_array().end_object();
  }
  const std::string text = header.end_object().text();
  std::string size(8, '\0');
  for (size_t i = 0; i < 8; ++i) size[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i));
  return size + text + data;
}

}  // namespace modicum
