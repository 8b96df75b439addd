// The location of a character that is not valid UTF-8. Internal to `json`.
#pragma once

#include <cstddef>
#include <string_view>

namespace modicum {

// Length of the character at `at` in bytes, 1 to 4; 0 if it is not valid. Expects at < text.size().
size_t utf8_length(std::string_view text, size_t at) noexcept;

}  // namespace modicum
