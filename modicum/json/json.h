// The door of `json`: a strict JSON reader and a writer.
//
// The reader is a cursor over a text that the caller owns. Each call takes the next value and
// passes it to a callback, so that no document tree is built. It needs 8 bytes of memory per key of
// the objects that are open.
//
//   read_json(R"({"a": 1, "b": [2, 3]})", [&](JsonValue& root) {
//     root.object([&](std::string_view key, JsonValue& value) {
//       if (key == "a") a = value.integer();      // "b" is not taken: skipped, and still checked
//     });
//   });
//
// Strict: RFC 8259; UTF-8 without overlong forms or surrogates; no duplicate keys (compared after
// unescaping); nesting up to 64; only white space after the document; all of it also in skipped
// values. Errors are JsonErrors with a byte offset; callers convert them to their own category. One
// thread.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "modicum/base/base.h"

namespace modicum {

enum class JsonFault : uint8_t {
  utf8,       // not UTF-8
  syntax,     // not JSON (also a lone surrogate, a raw control byte, nesting over 64)
  duplicate,  // a key occurs twice in one object
  type,       // JSON, but another type than expected (a string instead of a number)
  range,      // an integer not written as 0|[1-9][0-9]* or over 2^63-1
  trailing,   // text after the document
};

struct JsonError : std::runtime_error {
  JsonError(JsonFault fault_, uint64_t offset_, const std::string& what);
  Category format_category() const noexcept;  // the one of FORMAT.*
  JsonFault fault;
  uint64_t offset;  // byte offset in the text
};

// A value that can be taken once, by one of the calls from `object` on, within the callback that
// received it. The enclosing object or array skips and checks a value that was not taken. A
// callback may catch `type` (the value can still be taken) and `range` (it has been taken) and
// continue.
class JsonValue {
 public:
  enum class Kind : uint8_t { object, array, string, number, boolean, null };
  Kind kind();
  uint64_t offset() const noexcept;  // where it begins in the text

  // Calls `member` for each member in document order. The key is unescaped and valid during the
  // call.
  void object(FunctionRef<void(std::string_view key, JsonValue& value)> member);
  void array(FunctionRef<void(JsonValue& element)> element);
  std::string string();
  int64_t integer();  // 0 to 2^63-1, without sign, fraction or exponent; else `range`
  double number();
  bool boolean();
  void null();
  void skip();  // still checks the value

 private:
  friend struct JsonReader;
  explicit JsonValue(void* state) noexcept : state_(state) {}
  void* state_;
};

// Reads `text`, one document of less than 4 GiB, and calls `root` with its value. Duplicate keys
// are found at the end of their object, after its members have been passed to the callbacks.
void read_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);
// For a text that read_json has accepted: checks the syntax again, but neither UTF-8 nor
// duplicates, and so needs no memory.
void reread_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);

// Writes JSON into a string and adds commas and escapes. Misuse (a value instead of a key) is
// INTERNAL. Doubles are written in the shortest form that reads back, non-finite ones as null.
class JsonWriter {
 public:
  JsonWriter& begin_object() { return begin('{'); }
  JsonWriter& end_object() { return end('{', '}'); }
  JsonWriter& begin_array() { return begin('['); }
  JsonWriter& end_array() { return end('[', ']'); }
  JsonWriter& key(std::string_view name);
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  template <std::integral Integer>
  JsonWriter& value(Integer number) {
    return literal(std::to_string(number));
  }
  JsonWriter& value(double number);
  JsonWriter& value(bool truth) { return literal(truth ? "true" : "false"); }
  JsonWriter& null() { return literal("null"); }
  // Writes null for an empty optional.
  template <typename T>
  JsonWriter& value(const std::optional<T>& v) {
    return v ? value(*v) : null();
  }
  template <typename T>
  JsonWriter& member(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  // The document so far.
  const std::string& text() const noexcept { return text_; }

 private:
  void separate();
  JsonWriter& begin(char open);
  JsonWriter& end(char open, char close);
  JsonWriter& literal(std::string_view word);
  std::string text_;
  std::string open_;  // one of `{` `[` per open level, and `:` after a key
  bool first_ = true;
};

}  // namespace modicum
