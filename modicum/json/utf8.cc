#include "modicum/json/utf8.h"

#include <simdjson.h>

#include "modicum/json/json.h"

namespace modicum {

bool is_utf8(std::string_view text) noexcept {
  return simdjson::validate_utf8(text.data(), text.size());
}

size_t utf8_length(std::string_view text, size_t at) noexcept {
  const std::string_view rest = text.substr(at, 4);
  for (size_t length = 1; length <= rest.size(); ++length) {
    if (is_utf8(rest.substr(0, length))) return length;
  }
  return 0;
}

}  // namespace modicum
