// The public header of `json`: a strict JSON reader and a writer.
//
// The reader is a cursor over a text that the caller owns. It passes each value to a callback, so
// that no document tree is built. It keeps 8 bytes per key of every object that is still open.
//
//   read_json(R"({"a": 1, "b": [2, 3]})", [&](JsonValue& root) {
//     root.object([&](std::string_view key, JsonValue& value) {
//       if (key == "a") a = value.integer();      // "b" is not taken: it is checked and skipped
//     });
//   });
//
// Strict: RFC 8259; UTF-8 without overlong forms or surrogates; no duplicate keys (compared after
// unescaping); nesting up to 64; only white space after the document. Skipped values are checked in
// the same way. Errors are thrown as JsonErrors with a byte offset; callers convert them to their
// own category. Not thread-safe.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "modicum/base/base.h"

namespace modicum {

enum class JsonFault : uint8_t {
  utf8,       // not UTF-8
  syntax,     // not JSON (also a lone surrogate, a raw control byte, nesting over 64)
  duplicate,  // a key occurs twice in one object
  type,       // a value of another type than expected (a string instead of a number)
  // `integer` of a number that is not 0|[1-9][0-9]* or is over 2^63-1; `number` of a number that
  // is out of the range of a double; a document of 4 GiB or more
  range,
  trailing,  // text after the document
};

struct JsonError : std::runtime_error {
  JsonError(JsonFault fault_, uint64_t offset_, const std::string& what);
  Category format_category() const noexcept;  // FORMAT.UTF8, .DUP, .SCHEMA or .JSON
  JsonFault fault;
  uint64_t offset;  // byte offset in the text
};

// A value that a callback receives. The callback may take it once, by a call of one of the
// functions from `object` to `skip`. A value that it has not taken is checked and skipped after the
// callback. The callback may catch the JsonError of such a call and continue if the fault is `type`
// (the value can still be taken) or `range` (the value has been taken).
class JsonValue {
 public:
  enum class Kind : uint8_t { object, array, string, number, boolean, null };
  Kind kind();
  uint64_t offset() const noexcept;  // byte offset of the value in the text

  // Calls `member` for each member in document order. The key is unescaped and valid during the
  // call.
  void object(FunctionRef<void(std::string_view key, JsonValue& value)> member);
  void array(FunctionRef<void(JsonValue& element)> element);
  std::string string();
  int64_t integer();  // 0 to 2^63-1, without sign, fraction or exponent; else throws `range`
  double number();    // throws `range` if the number is too large or too small for a double
  bool boolean();
  void null();
  void skip();  // still checks the value

 private:
  friend struct JsonReader;
  explicit JsonValue(void* state) noexcept : state_(state) {}
  void* state_;
};

// Reads `text`, one document of less than 4 GiB, and calls `root` with its value. Throws
// `duplicate` at the end of an object, after its members have been passed to the callbacks.
void read_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);
// Reads a text that read_json has accepted. Checks the syntax again, but neither UTF-8 nor
// duplicate keys, so that it needs no memory for keys.
void reread_json(std::string_view text, FunctionRef<void(JsonValue& root)> root);

bool is_utf8(std::string_view text) noexcept;  // no overlongs, surrogates or values over U+10FFFF

// Writes JSON into a string and adds commas and escapes. Throws INTERNAL on misuse, such as a value
// where a key is expected. Doubles are written in the shortest form that reads back exactly,
// non-finite ones as null. Bytes that are not UTF-8 become U+FFFD.
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
  JsonWriter& json(std::string_view document) { return literal(document); }  // as it is
  // Writes null for an empty optional.
  template <typename T>
  JsonWriter& value(const std::optional<T>& v) {
    return v ? value(*v) : null();
  }
  template <typename T>
  JsonWriter& member(std::string_view name, const T& v) {
    return key(name).value(v);
  }
  void reserve(size_t bytes) { text_.reserve(bytes); }
  // The document so far.
  const std::string& text() const noexcept { return text_; }
  // Moves the document out. The writer must not be used afterwards.
  std::string take() noexcept { return std::move(text_); }

 private:
  void separate();
  JsonWriter& begin(char open);
  JsonWriter& end(char open, char close);
  JsonWriter& literal(std::string_view word);
  std::string text_;
  std::string open_;   // `{` or `[` for each open level, and `:` after a key
  bool first_ = true;  // no member or element of the innermost level has been written
};

}  // namespace modicum
