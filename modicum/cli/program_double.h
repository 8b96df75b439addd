// The program in this process, for tests: files of the test's choice, ranks that are threads, and
// output as texts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/cli/cli.h"
#include "modicum/json/json.h"

namespace modicum {

// A JSON value. Access to a member or an element that does not exist throws std::out_of_range.
class Document {
 public:
  static Document parse(std::string_view text);

  bool has(const std::string& key) const { return members_.contains(key); }
  const Document& operator[](const std::string& key) const;
  const Document& operator[](size_t number) const { return elements_.at(number); }
  const std::vector<Document>& elements() const noexcept { return elements_; }
  const std::map<std::string, Document>& members() const noexcept { return members_; }
  bool is_null() const noexcept { return kind_ == JsonValue::Kind::null; }
  bool is_true() const noexcept { return is_true_; }
  double number() const noexcept { return number_; }
  // Values are exact up to 2^53.
  int64_t bytes() const noexcept { return static_cast<int64_t>(number_); }
  const std::string& text() const noexcept { return text_; }

 private:
  explicit Document(JsonValue& value);
  Document() = default;

  JsonValue::Kind kind_ = JsonValue::Kind::null;
  std::map<std::string, Document> members_;
  std::vector<Document> elements_;
  std::string text_;
  double number_ = 0;
  bool is_true_ = false;
};

// The result of a run.
struct RunResult {
  int code = 0;
  std::string out;
  std::string err;

  Document json() const { return Document::parse(out); }
  Document error() const { return json()["error"]; }
};

std::vector<std::string> lines_of(const std::string& text);
bool has(const std::string& text, std::string_view part);

class ThreadedProgram {
 public:
  explicit ThreadedProgram(FileSystem& files) : files_(files) {}

  // Runs the program with the words of `line`, which spaces separate.
  RunResult run(std::string_view line) const;
  RunResult run(const std::vector<std::string>& words) const;
  // With --json. The test fails unless the exit code is 0; an empty document is returned then.
  Document succeed(std::string_view line) const;
  // With --json. The test fails unless the exit code is `code`, and the object `error` has that
  // code and a message, and stderr begins with "modicum: ".
  Document refuse(int code, std::string_view line) const;

 private:
  FileSystem& files_;
};

// A tensor of a file that checkpoint_file makes.
struct MadeTensor {
  std::string name;
  std::string dtype;  // BF16, F32, I64, ...
  std::vector<int64_t> shape;
};
// The bytes of a safetensors file. Floating-point values are between -0.07 and 0.07, and depend on
// the tensor's name; integers are small.
std::string checkpoint_file(const std::vector<MadeTensor>& tensors);

}  // namespace modicum
