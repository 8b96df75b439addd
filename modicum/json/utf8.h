// Inside the room `json`: UTF-8 by simdjson, with the place where it goes wrong.
#pragma once

#include <cstddef>
#include <string_view>

namespace modicum {

bool is_utf8(std::string_view text) noexcept;  // no overlongs, surrogates or values over U+10FFFF

// Bytes of the character that begins at `at`, 1 to 4; 0 where none does. `at` < text.size().
size_t utf8_length(std::string_view text, size_t at) noexcept;

}  // namespace modicum
