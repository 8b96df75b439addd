// UTF-8 validation by simdjson, and the location of an error. Internal to `json`.
#pragma once

#include <cstddef>
#include <string_view>

namespace modicum {

bool is_utf8(std::string_view text) noexcept;  // no overlongs, surrogates or values over U+10FFFF

// Length of the character at `at` in bytes, 1 to 4; 0 if it is not valid. Expects at < text.size().
size_t utf8_length(std::string_view text, size_t at) noexcept;

}  // namespace modicum
