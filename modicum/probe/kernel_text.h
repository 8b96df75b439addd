// Parsing of /proc and cgroup files: lines, and numbers in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace modicum {

// The non-empty parts of `text` between separators.
std::vector<std::string_view> split_kernel_text(std::string_view text, char separator);

// Parses `text`, without surrounding white space, as a number; nullopt if it is not one ("max").
std::optional<uint64_t> parse_kernel_number(std::string_view text, int base = 10) noexcept;

// The number in the line "LABEL  123" or "LABEL  123 kB", in the unit of the file. The label must
// match from the beginning of a line: "active_file" does not match "inactive_file 5".
std::optional<uint64_t> kernel_number_after(std::string_view text, std::string_view label) noexcept;

}  // namespace modicum
