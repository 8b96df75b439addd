// This parser is our own because simdjson's on-demand parser needs a padded copy, an index of 4
// bytes per token and a string buffer (3 times the size of a header of many small tensors), reports
// no exact offsets, and has undefined behaviour on some malformed input. We use simdjson to
// validate UTF-8, where its speed counts, and as the oracle of the tests.
#include "modicum/json/json.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <vector>

#include "modicum/base/base.h"
#include "modicum/json/utf8.h"

namespace modicum {
namespace {

constexpr int kDeepest = 64;

[[noreturn]] void refuse(JsonFault fault, size_t offset, const std::string& what) {
  throw JsonError(fault, offset, what);
}

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

// Whether a string may contain this character without an escape.
bool is_plain(char c) noexcept {
  return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\';
}

void append_utf8(std::string& out, uint32_t code) {
  auto add = [&out](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xc0 | code >> 6);
  } else if (code < 0x10000) {
    add(0xe0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3f));
  } else {
    add(0xf0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3f));
    add(0x80 | (code >> 6 & 0x3f));
  }
  add(0x80 | (code & 0x3f));
}

// Reads tokens. Each of literal, string and number begins with `at` at the first byte of a token,
// and ends with `at` after its last byte.
struct Cursor {
  std::string_view text;
  size_t at = 0;

  // The next byte; NUL at the end of the text, since no token contains a NUL.
  char peek() const noexcept { return at < text.size() ? text[at] : '\0'; }
  void skip_space() noexcept {
    while (at < text.size() &&
           (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t'))
      ++at;
  }
  bool skip_if(char c) noexcept {
    const bool is = at < text.size() && text[at] == c;
    if (is) ++at;
    return is;
  }
  // Throws `syntax` about the next byte: "expected WANTED, got 'x'".
  [[noreturn]] void refuse_for(const std::string& wanted) const;
  void literal(std::string_view word);
  std::string_view string(std::string& unescaped);
  std::string_view number();

 private:
  void digits();
  void escape(std::string& out);
  uint32_t hex4(size_t escape_at);
};

void Cursor::refuse_for(const std::string& wanted) const {
  std::string got = "the end of the text";
  if (at < text.size()) {
    const bool is_ascii = static_cast<unsigned char>(text[at]) < 0x80;
    got = is_ascii ? "'" + printable(text.substr(at, 1)) + "'" : "a character outside ASCII";
  }
  refuse(JsonFault::syntax, at, "expected " + wanted + ", got " + got);
}

void Cursor::literal(std::string_view word) {
  if (text.substr(at, word.size()) != word) refuse_for("a value");
  at += word.size();
}

void Cursor::digits() {
  if (!is_digit(peek())) refuse_for("a digit");
  while (is_digit(peek())) ++at;
}

std::string_view Cursor::number() {
  const size_t begin = at;
  skip_if('-');
  if (skip_if('0')) {
    if (is_digit(peek())) refuse(JsonFault::syntax, at, "a number with a leading zero");
  } else {
    digits();
  }
  if (skip_if('.')) digits();
  if (skip_if('e') || skip_if('E')) {
    if (!skip_if('+')) skip_if('-');
    digits();
  }
  return text.substr(begin, at - begin);
}

// Returns a view of `text` if the string has no escapes, else of `unescaped`.
std::string_view Cursor::string(std::string& unescaped) {
  const size_t quote = at++;
  size_t done = at;  // once there was an escape, `unescaped` has everything before this
  bool escaped = false;
  for (;; ++at) {
    while (at < text.size() && is_plain(text[at])) ++at;
    if (at == text.size()) refuse(JsonFault::syntax, quote, "a string without an end");
    if (text[at] == '"') break;
    if (text[at] != '\\') refuse(JsonFault::syntax, at, "a raw control byte in a string");
    if (!escaped) unescaped.clear();
    escaped = true;
    unescaped += text.substr(done, at - done);
    escape(unescaped);
    done = at--;  // the loop's ++at returns to this place
  }
  const std::string_view rest = text.substr(done, at++ - done);
  if (!escaped) return rest;
  return unescaped += rest;
}

void Cursor::escape(std::string& out) {
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const size_t begin = at++;
  const char letter = peek();
  ++at;
  if (const size_t i = kLetters.find(letter); i != std::string_view::npos) {
    out += kMeanings[i];
    return;
  }
  if (letter != 'u') refuse(JsonFault::syntax, begin, "an unknown escape");
  uint32_t code = hex4(begin);
  if (code >= 0xd800 && code < 0xdc00 && skip_if('\\') && skip_if('u')) {
    const uint32_t low = hex4(begin);
    if (low < 0xdc00 || low >= 0xe000) refuse(JsonFault::syntax, begin, "a lone surrogate");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  if (code >= 0xd800 && code < 0xe000) refuse(JsonFault::syntax, begin, "a lone surrogate");
  append_utf8(out, code);
}

uint32_t Cursor::hex4(size_t escape_at) {
  const std::string_view digits = text.substr(std::min(at, text.size()), 4);
  uint32_t code = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  if (digits.size() < 4 || error != std::errc() || end != digits.data() + 4) {
    refuse(JsonFault::syntax, escape_at, "expected four hexadecimal digits");
  }
  at += 4;
  return code;
}

}  // namespace

JsonError::JsonError(JsonFault fault_, uint64_t offset_, const std::string& what)
    : std::runtime_error(what), fault(fault_), offset(offset_) {}

Category JsonError::format_category() const noexcept {
  switch (fault) {
    case JsonFault::utf8: return Category::format_utf8;
    case JsonFault::duplicate: return Category::format_dup;
    case JsonFault::type:
    case JsonFault::range: return Category::format_schema;
    case JsonFault::syntax:
    case JsonFault::trailing: break;
  }
  return Category::format_json;
}

// Reads values; keeps the depth of nesting and the keys of the open objects.
struct JsonReader : Cursor {
  struct Key {
    uint32_t hash;
    uint32_t at;  // offset of the opening quote
  };
  // The state behind a JsonValue.
  struct Node {
    JsonReader* reader;
    size_t begin;
    JsonValue::Kind kind;
    bool taken = false;
  };

  bool seen_before = false;  // for reread_json: UTF-8 and duplicate keys are not checked
  int depth = 0;
  std::vector<Key> keys;  // innermost object last

  static JsonReader& take(void* state, JsonValue::Kind kind);
  JsonValue::Kind kind() const;
  template <typename Use>
  void value(const Use& use);
  template <typename Member>
  void object(const Member& member);
  template <typename Element>
  void array(const Element& element);
  void refuse_duplicates(size_t first);
  void document(FunctionRef<void(JsonValue& root)> root);

 private:
  void open();
  bool more(char close, bool first);
  std::string_view key_text(const Key& key, std::string& unescaped) const;
};

JsonReader& JsonReader::take(void* state, JsonValue::Kind kind) {
  auto* const node = static_cast<Node*>(state);
  MODICUM_ASSERT(!node->taken);
  if (node->kind != kind) {
    constexpr const char* kNames[] = {"an object", "an array",  "a string",
                                      "a number",  "a boolean", "null"};
    refuse(JsonFault::type, node->begin,
           std::string("expected ") + kNames[static_cast<size_t>(kind)] + ", got " +
               kNames[static_cast<size_t>(node->kind)]);
  }
  node->taken = true;
  return *node->reader;
}

JsonValue::Kind JsonReader::kind() const {
  switch (peek()) {
    case '{': return JsonValue::Kind::object;
    case '[': return JsonValue::Kind::array;
    case '"': return JsonValue::Kind::string;
    case 't':
    case 'f': return JsonValue::Kind::boolean;
    case 'n': return JsonValue::Kind::null;
    default: break;
  }
  if (peek() != '-' && !is_digit(peek())) refuse_for("a value");
  return JsonValue::Kind::number;
}

template <typename Use>
void JsonReader::value(const Use& use) {
  Node node{this, at, kind()};
  JsonValue value(&node);
  use(value);
  if (!node.taken) value.skip();
}

void JsonReader::open() {
  if (++depth > kDeepest) refuse(JsonFault::syntax, at, "nesting over 64");
  ++at;
}

// Moves to the next key or element and returns true, or past `close` and returns false.
bool JsonReader::more(char close, bool first) {
  skip_space();
  if (skip_if(close)) {
    --depth;
    return false;
  }
  if (!first && !skip_if(',')) {
    refuse_for(std::string("a comma or '") + close + "'");
  }
  skip_space();
  return true;
}

template <typename Member>
void JsonReader::object(const Member& member) {
  open();
  const size_t first_key = keys.size();
  std::string unescaped;
  for (bool first = true; more('}', first); first = false) {
    if (peek() != '"') refuse_for("a key");
    const auto key_at = static_cast<uint32_t>(at);
    const std::string_view key = string(unescaped);
    if (!seen_before) {
      const auto hash = static_cast<uint32_t>(std::hash<std::string_view>()(key));
      keys.push_back({hash, key_at});
    }
    skip_space();
    if (!skip_if(':')) refuse_for("a colon");
    skip_space();
    value([&](JsonValue& v) { member(key, v); });
  }
  refuse_duplicates(first_key);
}

template <typename Element>
void JsonReader::array(const Element& element) {
  open();
  for (bool first = true; more(']', first); first = false) value(element);
}

std::string_view JsonReader::key_text(const Key& key, std::string& unescaped) const {
  Cursor cursor{text, key.at};
  return cursor.string(unescaped);
}

// Checks the keys from `first` on and drops them. Compares the texts of keys with equal hashes,
// since different keys can have the same hash.
void JsonReader::refuse_duplicates(size_t first) {
  std::string unescaped;
  std::string other;
  const auto begin = keys.begin() + static_cast<ptrdiff_t>(first);
  std::sort(begin, keys.end(), [&](const Key& a, const Key& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    const int order = key_text(a, unescaped).compare(key_text(b, other));
    return order != 0 ? order < 0 : a.at < b.at;
  });
  for (auto key = begin; key != keys.end(); ++key) {
    if (key + 1 == keys.end() || key->hash != (key + 1)->hash) continue;
    const std::string_view name = key_text(*key, unescaped);
    if (name != key_text(*(key + 1), other)) continue;
    refuse(JsonFault::duplicate, (key + 1)->at, "the key '" + printable(name) + "' occurs twice");
  }
  keys.erase(begin, keys.end());
}

void JsonReader::document(FunctionRef<void(JsonValue& root)> root) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) {
    refuse(JsonFault::range, 0, "a document of 4 GiB or more");
  }
  if (!seen_before && !is_utf8(text)) {
    size_t offset = 0;
    while (const size_t length = utf8_length(text, offset)) offset += length;
    refuse(JsonFault::utf8, offset, "not UTF-8");
  }
  skip_space();
  value(root);
  skip_space();
  if (at != text.size()) refuse(JsonFault::trailing, at, "expected the end of the document");
}

JsonValue::Kind JsonValue::kind() {
  const auto* const node = static_cast<JsonReader::Node*>(state_);
  MODICUM_ASSERT(!node->taken);
  return node->kind;
}

uint64_t JsonValue::offset() const noexcept {
  return static_cast<JsonReader::Node*>(state_)->begin;
}

void JsonValue::object(FunctionRef<void(std::string_view, JsonValue&)> member) {
  JsonReader::take(state_, Kind::object).object(member);
}

void JsonValue::array(FunctionRef<void(JsonValue&)> element) {
  JsonReader::take(state_, Kind::array).array(element);
}

std::string JsonValue::string() {
  std::string unescaped;
  const std::string_view text = JsonReader::take(state_, Kind::string).string(unescaped);
  return std::string(text);
}

int64_t JsonValue::integer() {
  const std::string_view digits = JsonReader::take(state_, Kind::number).number();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (!is_digit(digits.front()) || end != digits.data() + digits.size()) {
    refuse(JsonFault::range, offset(), "not a plain non-negative integer");
  }
  if (error != std::errc()) refuse(JsonFault::range, offset(), "an integer over 2^63-1");
  return value;
}

double JsonValue::number() {
  const std::string_view digits = JsonReader::take(state_, Kind::number).number();
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc()) {
    refuse(JsonFault::range, offset(), "a number out of the range of a double");
  }
  return value;
}

bool JsonValue::boolean() {
  JsonReader& reader = JsonReader::take(state_, Kind::boolean);
  const bool truth = reader.peek() == 't';
  reader.literal(truth ? "true" : "false");
  return truth;
}

void JsonValue::null() { JsonReader::take(state_, Kind::null).literal("null"); }

void JsonValue::skip() {
  std::string unescaped;
  switch (kind()) {  // an object or an array skips the values that its callback leaves
    case Kind::object: return object([](std::string_view, JsonValue&) {});
    case Kind::array: return array([](JsonValue&) {});
    case Kind::string: JsonReader::take(state_, Kind::string).string(unescaped); return;
    case Kind::number: JsonReader::take(state_, Kind::number).number(); return;
    case Kind::boolean: boolean(); return;
    case Kind::null: return null();
  }
}

void read_json(std::string_view text, FunctionRef<void(JsonValue& root)> root) {
  JsonReader reader{{text}};
  reader.document(root);
}

void reread_json(std::string_view text, FunctionRef<void(JsonValue& root)> root) {
  JsonReader reader{{text}, true};
  reader.document(root);
}

}  // namespace modicum
