#include <array>
#include <charconv>
#include <cmath>

#include "modicum/base/base.h"
#include "modicum/json/json.h"
#include "modicum/json/utf8.h"

namespace modicum {
namespace {

void append_escaped(std::string& out, char c) {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kMeanings = "\"\\\b\f\n\r\t";
  constexpr std::string_view kLetters = "\"\\bfnrt";
  const auto byte = static_cast<unsigned char>(c);
  if (const size_t i = kMeanings.find(c); i != std::string_view::npos) {
    out += '\\';
    out += kLetters[i];
  } else if (byte < 0x20) {
    out += "\\u00";
    out += kHex[byte >> 4];
    out += kHex[byte & 0xf];
  } else {
    out += c;
  }
}

// Bytes that are not UTF-8 (file names may hold any) become U+FFFD, so that the document is valid.
void append_string(std::string& out, std::string_view text) {
  const bool valid = is_utf8(text);
  out += '"';
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t length = valid ? 1 : utf8_length(text, i);
    if (length == 0) out += "\xEF\xBF\xBD";
    if (length == 1) append_escaped(out, text[i]);
    if (length > 1) {
      out += text.substr(i, length);
      i += length - 1;
    }
  }
  out += '"';
}

}  // namespace

// Called before each value. Adds a comma if one is needed, and checks that a value may follow.
void JsonWriter::separate() {
  if (open_.empty()) {
    MODICUM_ASSERT(text_.empty());
  } else if (open_.back() == ':') {
    open_.pop_back();
  } else {
    MODICUM_ASSERT(open_.back() == '[');
    if (!first_) text_ += ',';
  }
  first_ = false;
}

JsonWriter& JsonWriter::begin(char open) {
  separate();
  text_ += open;
  open_ += open;
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::end(char open, char close) {
  MODICUM_ASSERT(!open_.empty());
  MODICUM_ASSERT(open_.back() == open);
  open_.pop_back();
  text_ += close;
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::literal(std::string_view word) {
  separate();
  text_ += word;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  MODICUM_ASSERT(!open_.empty());
  MODICUM_ASSERT(open_.back() == '{');
  if (!first_) text_ += ',';
  append_string(text_, name);
  text_ += ':';
  open_ += ':';
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  append_string(text_, text);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  if (!std::isfinite(number)) return null();
  std::array<char, 32> digits;
  const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  return literal({digits.data(), end});
}

}  // namespace modicum
