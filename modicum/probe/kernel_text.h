// Taking apart what the kernel writes: lines, and numbers in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace modicum {

// Without the separators; empty parts are left out.
std::vector<std::string_view> split_kernel_text(std::string_view text, char separator);

// All of `text` but white space around it, as a number; nothing where it isn't one ("max").
std::optional<uint64_t> parse_kernel_number(std::string_view text, int base = 10) noexcept;

// The number on the line "LABEL  123" or "LABEL  123 kB", in the unit that stands there. Only the
// whole label counts: "active_file" is not found in "inactive_file 5".
std::optional<uint64_t> kernel_number_after(std::string_view text, std::string_view label) noexcept;

}  // namespace modicum
