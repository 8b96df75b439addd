// The door of `json`: strict JSON in, JSON out.
//
// Reading is a cursor over a text that the caller keeps: each call takes the next value and hands
// it on, so that a document is never held twice: reading costs 8 bytes per key that stands in a
// still open object, and nothing else. Strict: RFC 8259, UTF-8 without overlongs or surrogates, no
// duplicate keys (compared after unescaping), no nesting over 64, nothing but white space after the
// document, also in values that are skipped. Whatever is wrong is a JsonError with its byte offset;
// the caller turns it into its own category. One thread.
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
  duplicate,  // a key stands twice in one object
  type,       // JSON, but not what was asked for (a string where a number is expected)
  range,      // an integer that is not written as 0|[1-9][0-9]* or does not fit 2^63-1
  trailing,   // something after the document
};

struct JsonError : std::runtime_error {
  JsonError(JsonFault fault_, uint64_t offset_, const std::string& what);
  JsonFault fault;
  uint64_t offset;  // byte offset in the text
};

// A value not yet taken. Exactly one of its taking calls is to be made, once, within the callback
// that got it (an untaken one is skipped, and checked, by the object or array around it). A
// callback may catch `type` (the value is still untaken) and `range` (it is taken), and go on.
class JsonValue {
 public:
  enum class Kind : uint8_t { object, array, string, number, boolean, null };
  Kind kind();
  uint64_t offset() const noexcept;  // where it begins in the text

  // Calls `member` for each member in the order written; the key is unescaped and valid during the
  // call only.
  void object(FunctionRef<void(std::string_view key, JsonValue& value)> member);
  void array(FunctionRef<void(JsonValue& element)> element);
  std::string string();
  int64_t integer();  // a non-negative integer in its plain form, at most 2^63-1; else `range`
  double number();
  bool boolean();
  void null();
  void skip();  // checks it all the same

 private:
  friend struct JsonReader;
  explicit JsonValue(void* state) noexcept : state_(state) {}
  void* state_;
};

// Reads `text` as one document, below 4 GiB, and calls `root` with its value. A duplicate key is
// found when its object ends: what comes before it has been handed on by then.
void read_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);
// For a text that read_json has accepted: does not look again for duplicates or bad UTF-8, and so
// needs no memory at all. Syntax is checked all the same.
void reread_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);

// Writes JSON into a string, with commas and escapes where they belong. Misuse (a value instead of
// a key) is INTERNAL. Numbers: integers as they are, doubles in the shortest form that reads back,
// non-finite ones as null.
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
  // Null where there is none.
  template <typename T>
  JsonWriter& value(const std::optional<T>& v) {
    return v ? value(*v) : null();
  }
  template <typename T>
  JsonWriter& member(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  // The document so far; complete when every begin has its end.
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
